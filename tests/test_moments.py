"""Moments of shards against NumPy's mean and variance of the whole batch."""

import numpy as np
import pytest

from gluon_parallel.moments import (
    Moments,
    as_channels,
    channel_shape,
    combine,
    combine_packed,
    measure,
    pack,
    sum_packed,
    unpack,
)

pytestmark = pytest.mark.arithmetic

SIZES = [(4, 4), (6, 2), (1, 7), (5, 3, 1), (5, 0), (0, 0, 3), (1, 1, 1, 1)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6, -1e9])
def test_moments_of_shards_are_those_of_the_batch(rng, sizes, offset):
    shards = [rng.normal(size=(size, 3, 4)) + offset for size in sizes]
    batch = np.concatenate(shards)
    whole = combine([measure(shard) for shard in shards])
    assert whole.count == sum(sizes) * 4
    np.testing.assert_allclose(whole.mean, batch.mean(axis=(0, 2)), rtol=1e-15, atol=1e-12)
    # float64 keeps 16 digits of the values: at 1e9 the variance of 1 is known to about 7 of its own
    error = 1e-13 + 1e-15 * abs(offset)
    np.testing.assert_allclose(whole.variance, batch.var(axis=(0, 2)), rtol=error, atol=error)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("value", [0.0, 0.1, 1e6 + 0.1, -3e30])
def test_a_constant_channel_has_no_variance_at_all(sizes, value):
    whole = combine([measure(np.full((size, 2, 3), np.float32(value))) for size in sizes])
    assert (whole.mean == np.float32(value)).all()
    assert (whole.m2 == 0).all()


def test_the_order_of_the_shards_does_not_matter(rng):
    parts = [measure(rng.normal(size=(size, 3))) for size in (5, 1, 9)]
    one, other = combine(parts), combine(parts[::-1])
    # roundings of values of size 1, whose mean may be near 0
    np.testing.assert_allclose(one.mean, other.mean, rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(one.m2, other.m2, rtol=1e-14, atol=1e-14)


def test_combining_in_groups_is_combining_at_once(rng):
    parts = [measure(rng.normal(size=(size, 3)) * size) for size in (5, 1, 9, 4)]
    grouped, flat = combine([combine(parts[:2]), combine(parts[2:])]), combine(parts)
    assert grouped.count == flat.count
    # roundings of values of size 10, whose mean may be near 0
    np.testing.assert_allclose(grouped.mean, flat.mean, rtol=1e-14, atol=1e-13)
    np.testing.assert_allclose(grouped.m2, flat.m2, rtol=1e-13, atol=1e-12)


def test_no_samples_anywhere_is_not_an_error():
    whole = combine([measure(np.zeros((0, 3))), measure(np.zeros((0, 3)))])
    assert whole.count == 0
    assert whole.variance.tolist() == [0, 0, 0]


def test_what_is_packed_comes_out_again_and_combines_alike(rng):
    parts = [measure(rng.normal(size=(size, 3))) for size in (2, 0, 4)]
    for expected, got in zip(parts, map(unpack, map(pack, parts))):
        assert got.count == expected.count
        assert (got.mean == expected.mean).all()
        assert (got.m2 == expected.m2).all()
    assert (combine_packed([pack(part) for part in parts]) == pack(combine(parts))).all()


def test_sums_of_the_backward_pass_add_up(rng):
    vectors = [rng.normal(size=6) for _ in range(3)]
    # two roundings of sums below 8, which may end near 0
    np.testing.assert_allclose(sum_packed(vectors), vectors[0] + vectors[1] + vectors[2], rtol=1e-15, atol=2e-15)


@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 3), 1), ((2, 3, 4), -1), ((2, 3, 4, 5), 2), ((2, 3, 4, 5, 6), 1), ((0, 3, 2), 1)]
)
def test_channels_come_to_the_middle_without_a_copy(shape, axis):
    x = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    channels = as_channels(x, axis)
    assert channels.base is not None
    assert channels.shape == channel_shape(shape, axis)
    for c in range(shape[axis]):
        assert (channels[:, c].ravel() == np.take(x, c, axis).ravel()).all()


def test_an_axis_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"axis 3 is not an axis .* \(2, 3\)"):
        channel_shape((2, 3), 3)


def test_the_variance_is_the_biased_one():
    assert Moments(4, np.zeros(1), np.array([8.0])).variance.tolist() == [2.0]
