"""Combination of packed moments and sums against NumPy's mean, variance and sum of the whole batch."""

import numpy as np
import pytest
from batch_norm_reference import added, combined, combined_messages, measured

pytestmark = pytest.mark.arithmetic

SIZES = [(4, 4), (6, 2), (1, 7), (5, 3, 1), (5, 0), (0, 0, 3), (1, 1, 1, 1)]


def parts_of(vector):
    """Count, mean and squared deviations."""
    return vector[0], *np.split(vector[1:], 2)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6, -1e9])
def test_moments_of_shards_are_those_of_the_batch(rng, sizes, offset):
    shards = [rng.normal(size=(size, 3, 4)) + offset for size in sizes]
    batch = np.concatenate(shards)
    count, mean, m2 = parts_of(combined([measured(shard) for shard in shards]))
    assert count == sum(sizes) * 4
    np.testing.assert_allclose(mean, batch.mean(axis=(0, 2)), rtol=1e-15, atol=1e-12)
    # float64 keeps 16 digits of the values: at 1e9 the variance of 1 is known to about 7 of its own
    error = 1e-13 + 1e-15 * abs(offset)
    np.testing.assert_allclose(m2 / count, batch.var(axis=(0, 2)), rtol=error, atol=error)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("value", [0.0, 0.1, 1e6 + 0.1, -3e30])
def test_a_constant_channel_has_no_variance_at_all(sizes, value):
    _, mean, m2 = parts_of(combined([measured(np.full((size, 2, 3), np.float32(value))) for size in sizes]))
    assert (mean == np.float32(value)).all()
    assert (m2 == 0).all()


def test_the_order_of_the_shards_does_not_matter(rng):
    parts = [measured(rng.normal(size=(size, 3))) for size in (5, 1, 9)]
    # roundings of values of size 1, whose mean may be near 0
    np.testing.assert_allclose(combined(parts), combined(parts[::-1]), rtol=1e-14, atol=1e-14)


def test_combining_in_groups_is_combining_at_once(rng):
    parts = [measured(rng.normal(size=(size, 3)) * size) for size in (5, 1, 9, 4)]
    grouped = combined([combined(parts[:2]), combined(parts[2:])])
    (count, mean, m2), flat = parts_of(grouped), parts_of(combined(parts))
    assert count == flat[0]
    # roundings of values of size 10, whose mean may be near 0
    np.testing.assert_allclose(mean, flat[1], rtol=1e-14, atol=1e-13)
    np.testing.assert_allclose(m2, flat[2], rtol=1e-13, atol=1e-12)


def test_no_samples_anywhere_is_not_an_error():
    assert combined([measured(np.zeros((0, 3)))] * 2).tolist() == [0.0] * 7


def test_sums_of_the_backward_pass_add_up(rng):
    vectors = [rng.normal(size=6) for _ in range(3)]
    # two roundings of sums below 8, which may end near 0
    np.testing.assert_allclose(added(vectors), vectors[0] + vectors[1] + vectors[2], rtol=1e-15, atol=2e-15)


@pytest.mark.parametrize("direction", [0, 1])
def test_messages_of_different_calls_have_no_number_when_they_are_combined(rng, direction):
    messages = [np.concatenate([(1.0, call), measured(rng.normal(size=(2, 3)))]) for call in (4, 4, 5)]
    assert combined_messages(messages[:2], direction)[:2].tolist() == [2, 4]
    count, call = combined_messages(messages, direction)[:2]
    assert count == 3 and np.isnan(call)
