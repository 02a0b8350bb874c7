"""Nets for the tests of ``gluon-parallel estimate``; as a program, what MXNet allocates to train one of them."""

import json
import math
import re
import sys
import tempfile
from pathlib import Path

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon


def convolutions():
    """Two convolutions of 8 and 16 channels, one with SyncBatchNorm."""
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Conv2D(8, 3, padding=1), gp.nn.SyncBatchNorm(), gluon.nn.Activation("relu"))
        net.add(gluon.nn.Conv2D(16, 3, padding=1), gluon.nn.Flatten(), gluon.nn.Dense(10))
    return net, (3, 8, 8)


def resnet():
    """ResNet-18 without a shape."""
    return gluon.model_zoo.vision.resnet18_v1(classes=10)


def mobilenet():
    """MobileNet, whose activations are larger than its weights."""
    return gluon.model_zoo.vision.mobilenet1_0(classes=10)


def words():
    """An LSTM over words, initialised, half of which is not trained."""
    net = gluon.nn.HybridSequential(prefix="words_")
    with net.name_scope():
        net.add(gluon.nn.Embedding(100, 16), gluon.rnn.LSTM(16, layout="NTC"), gluon.nn.Dense(100, flatten=False))
    net.initialize()
    net[0].weight.grad_req = "null"
    return net


def sparse():
    """An embedding whose gradient has the rows of the batch's words."""
    net = gluon.nn.HybridSequential(prefix="sparse_")
    with net.name_scope():
        net.add(gluon.nn.Embedding(40000, 64, sparse_grad=True), gluon.nn.GlobalAvgPool1D(), gluon.nn.Dense(4))
    return net


def squares():
    """21 MB of weights, and hardly any activations."""
    net = gluon.nn.HybridSequential(prefix="squares_")
    with net.name_scope():
        net.add(*(gluon.nn.Dense(1024, in_units=1024, use_bias=False) for _ in range(5)))
    return net, (1024,)


def lstm():
    """An LSTM of two layers, for vectors."""
    net = gluon.nn.HybridSequential(prefix="lstm_")
    with net.name_scope():
        net.add(gluon.rnn.LSTM(128, 2, layout="NTC", input_size=128), gluon.nn.Dense(4))
    return net


class Two(gluon.HybridBlock):
    """Two inputs, two outputs, a residual connection, float16."""

    def __init__(self):
        super().__init__(prefix="two_")
        with self.name_scope():
            self.dense = gluon.nn.Dense(6, in_units=6, flatten=False)

    def hybrid_forward(self, F, x, y):
        return self.dense(x) + x, [F.Dropout(y, p=0.5)]


def two():
    """See :class:`Two`."""
    net = Two()
    net.cast("float16")
    return net, [(6,), (4,)]


def imperative():
    """A net that cannot be traced."""
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(1))
    return net, (3,)


def looks():
    """A net whose graph depends on its input's values."""

    class Looks(gluon.HybridBlock):
        def hybrid_forward(self, F, x):
            return x if x.asscalar() > 0 else -x

    return Looks(), (3,)


def raises():
    raise RuntimeError("no such file\nor folder")


def ends():
    sys.exit(1)


def number():
    return 3


def shapes():
    return convolutions()[0], "large"


number_of_shapes = 3


def allocated(name, batch, num, *shape):
    """The bytes by which the process grows while it trains that net, and those that MXNet's profiler counts.

    The latter are the most that was allocated on each device.
    """
    before = resident("VmRSS")
    devices = gp.devices(f"cpu:{num}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "profile.json")
        mx.profiler.set_config(profile_memory=True, filename=str(file), continuous_dump=False)
        mx.profiler.set_state("run")
        net = globals()[name]()
        net.initialize(ctx=devices)
        net.hybridize()
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9})
        step = gp.DataParallel(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer)
        x, y = mx.nd.arange(batch * math.prod(shape)).reshape((batch, *shape)), mx.nd.ones(batch)  # different words
        mx.nd.waitall()
        mx.profiler.Marker(mx.profiler.Domain("test"), "steps").mark()  # initializers have arrays of their own
        for _ in range(2):
            step(x, y)
            mx.nd.waitall()
        mx.profiler.set_state("stop")
        mx.profiler.dump()
        events = json.loads(file.read_text("utf-8"))["traceEvents"]
    began = next(event["ts"] for event in events if event.get("name") == "steps")
    events = [event for event in events if event.get("ts", 0) >= began]
    counters = [f"Memory: cpu/{number}" for number in range(num)]
    counted = [max(float(event["args"][one]) for event in events if event.get("name") == one) for one in counters]
    return resident("VmHWM") - before, counted


def resident(name):
    """Bytes of this process's memory, now (VmRSS) or at most (VmHWM)."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))[1])


if __name__ == "__main__":
    print(json.dumps(allocated(sys.argv[1], *map(int, sys.argv[2:]))))
