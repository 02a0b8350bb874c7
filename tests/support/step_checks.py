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
