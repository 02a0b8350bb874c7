"""What a loss may return for a shard: one value per sample, or, with the word for it, their mean or their sum."""

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

REDUCTIONS = ("mean", "sum")
EXACT = {"rtol": 1e-6, "atol": 1e-7}  # float64 but for the update operator's float32 learning rate


def squares(output, label):
    """One value per sample."""
    return ((output - label) ** 2).sum(axis=1)


def reduced(reduction):
    return lambda output, label: getattr(squares(output, label), reduction)()


def build(num_devices, loss, **options):
    net = gluon.nn.Dense(2, in_units=3)
    net.cast("float64")
    net.initialize(mx.init.Constant(0.25), ctx=[mx.cpu(index) for index in range(num_devices)])
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    return net, gp.DataParallel(net, loss, trainer, **options)


def batches(sizes, seed):
    random = np.random.RandomState(seed)
    return [[nd.array(random.standard_normal((size, n)), dtype="float64") for n in (3, 2)] for size in sizes]


def weights(net):
    copies = [copy.asnumpy() for copy in net.weight.list_data()]
    for copy in copies[1:]:
        np.testing.assert_array_equal(copy, copies[0])
    return copies[0]


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"clip_global_norm": 0.5}], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("num_devices", [1, 3])
def test_a_mean_or_a_sum_trains_as_one_value_per_sample_does_on_one_device(num_devices, reduction, options, seed):
    one, reference = build(1, squares, **options)
    net, parallel = build(num_devices, reduced(reduction), reduction=reduction, **options)
    for batch in batches([7, 2, 5, 1, 3, 4], seed):
        wanted, got = reference(*batch), parallel(*batch)
        assert got.shape == (1,) and got.asscalar() == pytest.approx(wanted.asscalar(), rel=1e-10)
    np.testing.assert_allclose(weights(net), weights(one), **EXACT)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_shards_of_one_sample_need_no_word_and_larger_ones_are_refused_and_nothing_is_updated(reduction, seed):
    one, reference = build(1, squares)
    net, parallel = build(3, reduced(reduction))
    small, large = batches([3, 4], seed)
    assert parallel(*small).asscalar() == pytest.approx(reference(*small).asscalar(), rel=1e-10)
    np.testing.assert_allclose(weights(net), weights(one), **EXACT)
    with pytest.raises(gp.errors.BatchMismatch, match=r'for 2 samples on cpu\(0\).*reduction="mean".*reduction="sum"'):
        parallel(*large)
    np.testing.assert_allclose(weights(net), weights(one), **EXACT)


def test_a_word_that_is_none_is_refused_and_so_is_one_beside_values_per_sample_or_parts():
    for loss in (gluon.loss.L2Loss(), squares):
        _, parallel = build(2, loss, reduction="mean")
        with pytest.raises(
            gp.errors.BatchMismatch, match=r"shape \(4,\) for 4 samples.*reduction='mean'.*leave it out"
        ):
            parallel(*batches([7], 0)[0])
    with pytest.raises(ValueError, match="reduction: expected 'mean' or 'sum'.*got 'average'"):
        build(1, squares, reduction="average")

    def loss(output, label):
        return []

    loss.parts = ("classes", "boxes")
    with pytest.raises(ValueError, match="reduction='sum': the loss has parts \\(classes, boxes\\)"):
        build(1, loss, reduction="sum")
