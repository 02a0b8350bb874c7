"""Threads, nets and devices: equal to plain training where they must be, and no thread is left when something fails."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import archive
from gluon_parallel.errors import (
    AsynchronousUnsupported,
    BatchMismatch,
    CheckpointError,
    GradientUnavailable,
    NotFinite,
    WorkerTimeout,
)
from mxnet import gluon
from mxnet.gluon import nn

DEVICES = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
MODES = ["sync", "backup:1", "ssp:1", "local:2", "elastic", "async", "dc"]


def make_net():
    net = nn.HybridSequential()
    net.add(nn.Dense(8, in_units=5, activation="tanh"), nn.Dense(3, in_units=8))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def delayed(delay):
    """Makes nets that call ``delay(worker)`` in the forward pass of each step."""
    workers = itertools.count()

    def make():
        net, worker = make_net(), next(workers)
        net.register_forward_hook(lambda *_: delay(worker) if mx.autograd.is_recording() else None)
        return net

    return make


def batches(rng, count=12, size=8):
    x = rng.normal(size=(count * size, 5)).astype("float32")
    y = (x[:, 0] > 0).astype("int32") + (x[:, 1] > 0)
    return [(x[start : start + size], y[start : start + size]) for start in range(0, count * size, size)]


def start(mode, num=3, make=make_net, **options):
    params = options.pop("optimizer_params", {"learning_rate": 0.2})
    loss = options.pop("loss", gluon.loss.SoftmaxCrossEntropyLoss())
    return gp.asynchronous.Asynchronous(make, loss, DEVICES[:num], mode, optimizer_params=params, **options)


def plain(initial, data, size, optimizer="sgd", **params):
    """Gluon on one device, with `size` batches joined."""
    net = make_net()
    for parameter, array in zip(net.collect_params().values(), initial):
        parameter.set_data(mx.nd.array(array))
    trainer = gluon.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.2, **params})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    for at in range(0, len(data), size):
        x, y = (np.concatenate(parts) for parts in zip(*data[at : at + size]))
        with mx.autograd.record():
            value = loss(net(mx.nd.array(x)), mx.nd.array(y))
        value.backward()
        trainer.step(len(x))
    return [parameter.data().asnumpy() for parameter in net.collect_params().values()]


def uneven(rng):
    """Batches of different sizes."""
    x, y = (np.concatenate(parts) for parts in zip(*batches(rng)))
    ends = np.cumsum([8, 1, 5, 8, 3, 2, 7, 4, 6, 8, 8, 36])
    return list(zip(np.split(x, ends[:-1]), np.split(y, ends[:-1])))


def reduced(reduction):
    """The mean or the sum of the loss per sample."""
    each = gluon.loss.SoftmaxCrossEntropyLoss()
    return lambda output, label: getattr(each(output, label), reduction)()


def weights_of(parallel):
    return [parameter.data(DEVICES[0]).asnumpy() for parameter in parallel.net.collect_params().values()]


SYNC, ASYNC = ("sync", 3, 3), ("async", 1, 1)
LIMITS = [
    (batches, ("ssp:0", 3, 3), "sgd", {}, None),
    (batches, ("backup:0", 2, 2), "sgd", {}, None),
    (uneven, ("local:1", 2, 2), "sgd", {}, None),
    (uneven, ASYNC, "sgd", {"momentum": 0.9, "wd": 0.01}, None),
    (uneven, ASYNC, "adam", {}, None),
    *((uneven, mode, "sgd", {}, loss) for mode in (SYNC, ASYNC) for loss in (None, "mean", "sum", "NumPy mode")),
]


@pytest.mark.parametrize(("make_batches", "mode", "name", "params", "loss"), LIMITS)
def test_limits_of_the_dial_are_gluons_trainer_on_one_device(request, rng, make_batches, mode, name, params, loss):
    data, (mode, num, size), array = make_batches(rng), mode, np.array
    options = {"loss": reduced(loss), "reduction": loss} if loss in ("mean", "sum") else {}
    if loss == "NumPy mode":
        request.getfixturevalue("numpy_mode")
        array = mx.np.array
    parallel = start(mode, num, optimizer=name, optimizer_params={"learning_rate": 0.2, **params}, **options)
    initial = weights_of(parallel)
    done = parallel.train([(array(x), array(y)) for x, y in data])
    got = weights_of(parallel)
    mx.npx.reset_np()
    for weight, wanted in zip(got, plain(initial, data, size, name, **params)):
        # float32, 12 steps, sums in another order; Adam divides by the root of squares, which makes roundings larger
        np.testing.assert_allclose(weight, wanted, rtol=5e-3, atol=5e-4 if name == "adam" else 2e-6)
    assert done.num_samples == 96
    assert parallel.staleness.mean <= num - 1


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_single_value_is_refused_without_the_word(rng, reduction):
    with pytest.raises(BatchMismatch, match=r'for 8 samples on cpu.*reduction="mean" or reduction="sum"'):
        start("async", loss=reduced(reduction)).train(batches(rng))
    with pytest.raises(ValueError, match="reduction: expected 'mean' or 'sum'.*got 'average'"):
        start("async", reduction="average")


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_and_all_replicas_end_alike(rng, mode):
    parallel = start(mode)
    data = batches(rng, 40)
    first = parallel.train(data)
    for _ in range(4):
        last = parallel.train(data)
    assert last.loss < 0.85 * first.loss
    assert last.num_samples == 320
    assert sum(last.steps) == 40
    for replica in parallel._replicas[1:]:
        np.testing.assert_array_equal(replica.get_weights(), parallel._replicas[0].get_weights())


def test_a_slow_device_does_fewer_steps_in_async_and_as_many_in_sync(rng):
    done, enough = itertools.count(1), threading.Event()

    def delay(worker):
        if worker == 0:
            enough.wait(0.01 if in_step else 60)
        elif next(done) == 25:
            enough.set()

    in_step = True
    assert start("sync", make=delayed(delay)).train(batches(rng, 30)).steps == (10, 10, 10)
    in_step, done = False, itertools.count(1)
    enough.clear()
    steps = start("async", make=delayed(delay)).train(batches(rng, 30)).steps
    assert sum(steps) == 30 and steps[0] <= 5


class Boom(Exception):
    pass


def failing_loss(after):
    calls = itertools.count(1)

    def loss(output, label):
        if next(calls) == after:
            raise Boom("the fifth call")
        return gluon.loss.SoftmaxCrossEntropyLoss()(output, label)

    return loss


@pytest.mark.parametrize("mode", MODES)
def test_a_failing_worker_stops_the_others_and_its_own_traceback_arrives(rng, mode):
    parallel = gp.asynchronous.Asynchronous(make_net, failing_loss(5), DEVICES, mode)
    with pytest.raises(Boom, match="the fifth call") as caught:
        parallel.train(batches(rng, 40))
    names = [entry.name for entry in caught.traceback]
    assert "_work" in names
    assert names[-1] == "loss"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("worker ")]
    parallel.train(batches(rng, 6))  # and the next pass works


def test_batches_that_cannot_be_loaded_or_have_a_loss_that_is_not_finite_stop_everybody(rng):
    def broken():
        yield from batches(rng, 5)
        raise Boom("the disk")

    with pytest.raises(Boom, match="the disk"):
        start("async").train(broken())
    data = batches(rng)
    data[7][0][:] = np.nan
    with pytest.raises(NotFinite, match=r"worker \d on cpu\(\d\), batch 7: the loss is nan"):
        start("async").train(data)


def test_a_worker_that_hangs_is_named_and_does_not_hold_the_others_for_ever(rng):
    hangs = []

    def delay(worker):
        while worker in hangs and not parallel._threads._stopped:
            time.sleep(0.01)

    def shorten():
        while parallel._threads._pushes < 5:  # after those of the workers 0 and 2 nothing is pushed
            time.sleep(0.01)
        parallel._threads.timeout = 0.1

    parallel = start("sync", make=delayed(delay))
    parallel.train(batches(rng, 3))  # 3 pushes
    hangs.append(1)
    threading.Thread(target=shorten).start()
    with pytest.raises(WorkerTimeout, match="worker 1 had a batch"):
        parallel.train(batches(rng))


def test_control_c_joins_all_threads_before_it_is_passed_on():
    program = textwrap.dedent("""
        import signal, threading, time
        import gluon_parallel as gp
        import mxnet as mx
        import numpy as np
        from mxnet import gluon
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
        def make_net():
            net = gluon.nn.Dense(2, in_units=3)
            net.register_forward_hook(lambda *_: time.sleep(0.02))
            return net
        parallel = gp.asynchronous.Asynchronous(
            make_net, gluon.loss.L2Loss(), gp.devices("cpu:2"), "ssp:1")
        gp.parallel_apply(abs, [mx.nd.ones(1, device) for device in parallel.devices])  # starts the devices' threads
        before = set(threading.enumerate())
        def forever():
            batch = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")
            yield batch
            print("training", flush=True)
            while True:
                yield batch
        try:
            parallel.train(forever())
        except KeyboardInterrupt:
            print("left:", [thread.name for thread in threading.enumerate() if thread not in before])
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout.readline().strip() == "training"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert rest.strip() == "left: []"
    assert process.returncode == 0


class Unused(nn.HybridSequential):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.idle, self.used = nn.Dense(2, in_units=2), nn.Dense(3, in_units=5)

    def hybrid_forward(self, F, x):
        return self.used(x)


def chain(*blocks, dtype="float32"):
    net = nn.HybridSequential()
    net.add(*blocks)
    blocks[-1].cast(dtype)
    return net


def with_norm():
    return chain(nn.BatchNorm(in_channels=5), nn.Dense(3, in_units=5))


MEETS, SHARED = "SyncBatchNorm: in it all devices wait for each other", make_net()
REFUSED = [
    (lambda: chain(nn.Dense(5), chain(gp.nn.SyncBatchNorm(in_channels=5))), AsynchronousUnsupported, MEETS),
    (lambda: chain(gluon.contrib.nn.SyncBatchNorm(num_devices=3)), AsynchronousUnsupported, MEETS),
    *(
        (lambda dtype=dtype: chain(nn.BatchNorm(in_channels=5), nn.LayerNorm(in_channels=5), dtype=dtype),
         AsynchronousUnsupported, f"is {dtype}; the shared weights are float32")
        for dtype in ("float64", "float16")
    ),
    (lambda: SHARED, ValueError, "same block twice"),
    (Unused, GradientUnavailable, "got no gradient: the loss does not depend on it"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_a_net_that_cannot_be_trained_is_refused_with_the_reason(rng, make, error, message):
    with pytest.raises(error, match=message):
        start("async", make=make).train(batches(rng))


def test_running_statistics_are_the_mean_over_the_replicas(rng):
    parallel = start("async", make=with_norm)
    seen = []
    for replica in parallel._replicas:
        replica.set_statistics = lambda arrays, seen=seen: seen.append(arrays)
    parallel.train(batches(rng))
    found = zip(*(replica.get_statistics() for replica in parallel._replicas))
    wanted = [np.mean(arrays, axis=0, dtype="float64") for arrays in found]
    for got, want in zip(seen[-1], wanted):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)  # float32 of size 1


@pytest.mark.parametrize(("name", "params"), [("sgd", {"momentum": 0.9}), ("adam", {})])
def test_training_goes_on_from_a_saved_state_bit_for_bit(rng, tmp_path, name, params):
    data, options = batches(rng), {"optimizer": name, "optimizer_params": {"learning_rate": 0.05, **params}}
    through = start("sync", **options)
    through.train(data)
    archive.write(tmp_path / "saved.npz", *through.state())
    through.train(data)
    resumed = start("sync", **options)
    resumed.restore(archive.Archive(*archive.read(tmp_path / "saved.npz")))
    resumed.train(data)
    np.testing.assert_array_equal(resumed._replicas[0].get_weights(), through._replicas[0].get_weights())


def test_a_state_that_does_not_fit_is_refused_with_what_differs(rng):
    with pytest.raises(CheckpointError, match="not saved by asynchronous training"):
        start("sync").restore(archive.Archive({}, {}))
    trained = start("async")
    another = start("async", make=lambda: chain(nn.Dense(9, in_units=5), nn.Dense(3, in_units=9)))
    trained.train(batches(rng))
    another.restore(trained.state())
    what = r"than this HybridSequential: .*0.bias is float32 \(8,\) in the checkpoint and float32 \(9,\) here"
    with pytest.raises(CheckpointError, match=what):
        another.train(batches(rng))


def test_a_net_of_its_own_loads_what_was_trained_asynchronously(rng):
    parallel, net = start("async", make=with_norm), with_norm()
    parallel.train(batches(rng))
    net.initialize()
    gp.checkpoint.restore(parallel.state(), net)
    x = mx.nd.array(rng.normal(size=(7, 5)))
    np.testing.assert_array_equal(net(x).asnumpy(), parallel.net(x).asnumpy())
