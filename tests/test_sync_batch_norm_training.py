"""Training runs: many devices with small shards follow one device with the whole batch, step by step."""

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import nn
from mxnet import gluon


class NormalisedLoss(gluon.loss.L2Loss):
    """A loss with a layer of its own, whose parameters have names that the net's have, too."""

    def __init__(self, norm):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.norm = norm(in_channels=3)

    def hybrid_forward(self, F, output, label):
        return super().hybrid_forward(F, self.norm(output), label)


@pytest.mark.parametrize("converts", [False, True])
def test_layers_of_the_loss_are_layers_of_the_step(rng, converts):
    """They leave out devices without samples, are warned of, and prepare connects and converts them."""
    batches = [rng.normal(size=(2, size, 3)) for size in (8, 2, 1, 7)]
    found = []
    for num_devices in (1, 3):
        net = gluon.nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(gluon.nn.Dense(3, in_units=3), nn.SyncBatchNorm(in_channels=3, timeout=60))
        loss = NormalisedLoss(gluon.nn.BatchNorm if converts or num_devices == 1 else nn.SyncBatchNorm)
        for block in (net, loss):
            block.initialize(mx.init.One(), ctx=gp.devices(f"cpu:{num_devices}"))
            block.cast("float64")
            block.hybridize()
        net[0].weight.set_data(mx.nd.arange(9, dtype="float64").reshape((3, 3)) % 4)
        parameters = [one for block in (net, loss) for one in block.collect_params().values()]
        trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 0.1})
        training = gp.prepare(net, loss, trainer, sync_batch_norm=converts)
        values = [training.step(*mx.nd.array(batch, dtype="float64")).asscalar() for batch in batches]
        found.append([values, *(one.data(one.list_ctx()[-1]).asnumpy() for one in parameters)])
        if num_devices > 1:
            assert loss.norm.sync_group.store is training.store
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)  # MXNet's scalars are float32


@pytest.mark.filterwarnings("ignore:Cannot decide type")  # of the imported net's input, which MXNet does not need
def test_plain_layers_of_the_loss_and_of_graphs_are_warned_of_with_what_helps(rng, tmp_path):
    devices, x = gp.devices("cpu:2"), mx.nd.array(rng.normal(size=(8, 3)))

    def step(net, loss, *labels):
        parallel = gp.DataParallel(net, loss, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}))
        return [parallel.step(x, *labels).asscalar() for _ in range(2)]

    loss = NormalisedLoss(gluon.nn.BatchNorm)
    loss.initialize(ctx=devices)
    net = gluon.nn.Dense(3, in_units=3)
    net.initialize(ctx=devices)
    with pytest.warns(gp.errors.StatisticsPerDevice, match=r"net_batchnorm0 is BatchNorm: .* gp.nn.convert_sync_b"):
        step(net, loss, x)

    def make(some):
        net = gluon.nn.HybridSequential(prefix="exported_")
        with net.name_scope():
            net.add(gluon.nn.Dense(3, in_units=3), gluon.nn.BatchNorm(in_channels=3))
        net.initialize(ctx=some)
        return net

    def square(y):
        return (y * mx.nd.arange(3, ctx=y.ctx) - 1) ** 2

    net = make(devices)
    net.hybridize()
    net(x.as_in_context(devices[0]))
    net.export(str(tmp_path / "net"))
    files = [str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")]
    words = r"BatchNorm: .*That graph cannot be converted: .* by net.collect_params\(\).load\(.*\). Then gp.nn"
    with pytest.warns(gp.errors.StatisticsPerDevice, match=words):
        step(gluon.SymbolBlock.imports(*files, ctx=devices), square)
    alone = step(gluon.SymbolBlock.imports(*files, ctx=devices[:1]), square)
    net = make(devices)
    net.collect_params().load(files[-1])
    np.testing.assert_allclose(step(nn.convert_sync_batchnorm(net), square), alone, rtol=1e-5, atol=1e-6)


def test_a_split_may_leave_out_any_device():
    random = np.random.RandomState(3)
    x, y = (mx.nd.array(random.standard_normal((5, width)), dtype="float64") for width in (3, 1))
    found = []
    for num, use in [(1, [0]), (3, [2]), (3, [0, 2])]:
        devices = [mx.cpu(number) for number in range(num)]
        net = gluon.nn.HybridSequential()
        net.add(nn.SyncBatchNorm(in_channels=3, timeout=60), gluon.nn.Dense(1, in_units=3))
        net.cast("float64")
        net.initialize(mx.init.One(), ctx=devices)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        step = gp.DataParallel(
            net, gluon.loss.L2Loss(), trainer,
            split=lambda data, devices, use=use: gp.split_and_load(data, [devices[number] for number in use]),
        )  # fmt: skip
        step(x, y)
        step(x, y)
        found.append([[data.asnumpy() for data in one.list_data()] for one in net.collect_params().values()])
    for other in found[1:]:
        for copies, [wanted] in zip(other, found[0]):
            for copy in copies:
                np.testing.assert_allclose(copy, wanted, rtol=1e-9, atol=1e-12)
