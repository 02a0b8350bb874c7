"""What processes do in NumPy mode, run by every process of a group: ``python numpy_mode_checks.py store``."""

import os
import sys

import numpy as np

import gluon_parallel as gp
import mxnet as mx

if __name__ == "__main__":  # pytest reads the file too, in search of doctests
    mx.npx.set_np()
DEVICES = gp.devices("cpu:2")


def sums(store):
    """Arrays of any shape, by name and by number, sent and summed; three times, for the second takes other ways."""
    for number, shape in enumerate([(3, 2), (), (0,), (0, 3), (70001,)]):
        for dtype in ("float32", "float16", "int32"):
            key = f"{number} {dtype}"
            arrays = [mx.np.full(shape, store.rank + 7, dtype=dtype, ctx=device) for device in DEVICES]
            store.broadcast(key, arrays[0], arrays)
            value = 7
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


def training(store):
    """Processes of two devices train as one process of one device; the last batches are only the first process's."""
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


if __name__ == "__main__":
    store = gp.kvstore.create(sys.argv[1])
    for name in sys.argv[2:]:
        globals()[name](store)
    os.write(1, f"process {store.rank} of {store.num_workers}: right\n".encode())
