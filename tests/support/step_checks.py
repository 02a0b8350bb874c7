"""Checks of steps between processes: averaged weights, and NumPy mode; a loss of parts."""

import functools

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

DEVICES = gp.devices("cpu:2")


class Loss:
    """The mean square of what is not masked, and the mean of the outputs above 0."""

    parts = ("square", "above")

    def __call__(self, output, label, mask):
        above = output > 0
        return [((output - label) ** 2 * mask).sum(), mask.sum()], [(output * above).sum(), above.sum()]


def check_local_training_takes_the_mean_over_the_processes_after_every_second_step(store):
    net = gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Constant(10.0 * (store.rank + 1)), ctx=DEVICES)
    averaging, mean = gp.asynchronous.Averaging(net, store, every=2), 10.0  # all begin with rank 0's
    for step in range(1, 5):
        for data in net.weight.list_data():
            data += store.rank + 1
        assert averaging.step() == (step % 2 == 0)
        mean += (store.num_workers + 1) / 2
        wanted = mean if step % 2 == 0 else mean - (store.num_workers + 1) / 2 + store.rank + 1
        assert [data.asscalar() for data in net.weight.list_data()] == [wanted] * 2


def in_numpy_mode(check):
    """The check after ``mx.npx.set_np()``, which is taken back."""

    @functools.wraps(check)
    def checked(store):
        mx.npx.set_np()
        try:
            check(store)
        finally:
            mx.npx.reset_np()

    return checked


@in_numpy_mode
def check_arrays_of_any_shape_are_sent_and_summed_in_numpy_mode(store):
    """Three times, for the second takes other ways."""
    for number, shape in enumerate([(3, 2), (), (0,), (0, 3), (70001,)]):
        for dtype in ("float32", "float16", "int32"):
            key = f"NumPy mode {number} {dtype}"
            arrays = [mx.np.full(shape, store.rank + 3, dtype=dtype, ctx=device) for device in DEVICES]
            store.broadcast(key, arrays[0], arrays)
            value = 3
            for _ in range(3):
                for array in arrays:
                    assert type(array) is mx.np.ndarray
                    np.testing.assert_array_equal(array.asnumpy(), np.full(shape, value, dtype), err_msg=key)
                store.pushpull(key, arrays)
                value *= 2 * store.num_workers
            kept = mx.np.full(shape, store.rank, dtype=dtype)
            store.pushpull(key, kept, out=arrays)
            total = store.num_workers * (store.num_workers - 1) // 2
            for array in arrays:
                np.testing.assert_array_equal(array.asnumpy(), np.full(shape, total, dtype))
    mx.nd.waitall()


def build(devices, store=None):
    net = mx.gluon.nn.HybridSequential()
    net.add(
        mx.gluon.nn.Conv2D(3, 3, in_channels=1),
        gp.nn.SyncBatchNorm(in_channels=3, kvstore=store),
        mx.gluon.nn.Activation("relu"),
        mx.gluon.nn.Dense(4, in_units=3 * 16),
    )
    net.initialize(ctx=devices)
    random = np.random.RandomState(2)
    for name, parameter in net._collect_params_with_prefix().items():
        if not name.endswith(("gamma", "running_var")):
            parameter.set_data(mx.np.array(random.standard_normal(parameter.shape) * 0.3))
    net.hybridize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=store)
    return net, trainer, gp.DataParallel(net, mx.gluon.loss.SoftmaxCrossEntropyLoss(), trainer)


@in_numpy_mode
def check_processes_train_in_numpy_mode_as_one_device_does(store):
    """The last batches are only the first process's."""
    random = np.random.RandomState(0)
    batches = [(random.standard_normal((n, 1, 6, 6)).astype("f"), random.randint(0, 4, n)) for n in (7, 9, 5, 4, 2)]
    num = 3  # the batches that all have a share of
    alone, _, step = build([mx.cpu(0)])
    for x, y in batches:
        step(mx.np.array(x), mx.np.array(y))
    net, trainer, step = build(DEVICES, store)
    share = slice(store.rank, None, store.num_workers)
    mine = [(x[share], y[share]) for x, y in batches[:num]] + (batches[num:] if store.rank == 0 else [])
    for batch in gp.sampler.join(mine, store):
        loss = step(None) if batch is None else step(*map(mx.np.array, batch))
        assert type(loss) is mx.np.ndarray and loss.shape == (1,)
    for name, parameter in net._collect_params_with_prefix().items():
        for array in parameter.list_data():
            np.testing.assert_allclose(
                array.asnumpy(), alone._collect_params_with_prefix()[name].data().asnumpy(), rtol=2e-4, atol=2e-5,
                err_msg=name,
            )  # fmt: skip
    everything = [(mx.np.array(x), mx.np.array(y)) for x, y in batches]
    part = [(mx.np.array(x[share]), mx.np.array(y[share])) for x, y in batches]
    assert gp.evaluate(net, part, "acc", DEVICES, store) == gp.evaluate(alone, everything, "acc", [mx.cpu(0)])
    archive = gp.checkpoint.state(net, trainer)
    gp.checkpoint.restore(archive, net, trainer)
    for name, array in gp.checkpoint.state(net, trainer).arrays.items():
        np.testing.assert_array_equal(array, archive.arrays[name])
