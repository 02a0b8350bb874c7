"""Losses made of sums and counts: the same for any shards, on any number of devices; step_checks.py has processes."""

import numpy as np
import pytest
from step_checks import Loss, in_numpy, make, make_batches

import gluon_parallel as gp
import mxnet as mx
from mxnet import nd


@pytest.mark.arithmetic
@pytest.mark.parametrize(("num_devices", "dtype"), [(1, "float32"), (2, "float64"), (3, "float32")])
def test_each_sum_is_divided_by_its_count_over_all_devices(rng, num_devices, dtype):
    batches = make_batches(rng, (7, 2, 1, 5))
    batches[2][2][:] = 0  # nothing counts at all
    net, step = make(num_devices)
    net.cast(dtype)
    step.loss = lambda *values: [(total, count.astype("float32")) for total, count in Loss()(*values)]  # of two types
    wanted, weight = in_numpy(net.weight.data(mx.cpu(0)).asnumpy(), batches)
    for (x, label, mask), (square, above) in zip(batches, wanted):
        arrays = [nd.array(array, dtype=dtype) for array in (x, label, mask)]
        loss = step(arrays[0], arrays[1:])
        np.testing.assert_allclose(loss.asscalar(), square + above, rtol=1e-5, atol=1e-6)
        values = {name: value.asscalar() for name, value in step.parts.items()}
        np.testing.assert_allclose([values["square"], values["above"]], [square, above], rtol=1e-5, atol=1e-6)
        assert step.num_samples == len(x)
    for device in range(num_devices):
        np.testing.assert_allclose(net.weight.data(mx.cpu(device)).asnumpy(), weight, rtol=1e-4, atol=1e-6)


@pytest.mark.arithmetic
def test_the_norm_that_is_clipped_is_that_of_the_divided_gradient(rng):
    [(x, label, mask)] = make_batches(rng, (5,))
    net, step = make(2, clip_global_norm=1e-3)
    before = net.weight.data(mx.cpu(0)).asnumpy()
    step(x, (label, mask))
    moved = np.linalg.norm(net.weight.data(mx.cpu(0)).asnumpy() - before)
    np.testing.assert_allclose(moved, 0.1 * 1e-3, rtol=1e-3, atol=2e-7)  # 12 float32 weights of up to 1 are rounded


def test_losses_of_another_form_are_refused():
    net, step = make(1)
    for wrong in (
        lambda *_: [(nd.ones(1), nd.ones(1))],
        lambda *_: [(nd.ones(2), nd.ones(1))] * 2,
        lambda *_: nd.ones(2),
    ):
        step.loss = wrong
        with pytest.raises(gp.errors.BatchMismatch, match=r"returns 2 pairs \(sum, count\)"):
            step(np.ones((2, 4)))
