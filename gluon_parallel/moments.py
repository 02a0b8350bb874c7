"""Moments of a shard's channels, how shards combine exactly, and the sums of the backward pass; NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Moments(NamedTuple):
    """Count, mean and squared deviations of each channel; shards combine exactly, whatever their sizes.

    The sum of squares is never formed: at a mean of 1e6 and a variance of 1 it would need 41 bits before the first
    bit of the variance, and the subtraction of two such numbers is what makes other layers lose it.
    """

    count: int  # type: ignore[assignment]  # values per channel: N * H * W; 0 for a shard without samples
    mean: np.ndarray  # (C,) float64
    m2: np.ndarray  # (C,) float64, sum of squared deviations from `mean`

    @property
    def variance(self):
        """(C,) the biased variance, ``m2 / count``; zeros where there are no values."""
        return self.m2 / max(self.count, 1)


def as_channels(x, axis):
    """View `x` as (outer, C, inner), the channels of `axis` in the middle; no copy for a contiguous array.

    Args:
        x: array of one dimension or more.
        axis: the channel axis; may be negative.

    Raises:
        ValueError: `x` has no such axis.

    Example:
        >>> as_channels(np.zeros((2, 5, 4, 3)), axis=1).shape
        (2, 5, 12)
        >>> as_channels(np.zeros((2, 4, 3, 5)), axis=-1).shape
        (24, 5, 1)
    """
    return x.reshape(channel_shape(x.shape, axis))


def channel_shape(shape, axis):
    """The shape (outer, C, inner) of :func:`as_channels`, from the shape alone.

    Example:
        >>> channel_shape((2, 5, 4, 3), axis=1)
        (2, 5, 12)
    """
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis {axis} is not an axis of an array of shape {tuple(shape)}")
    axis %= len(shape)
    outer, inner = 1, 1
    for size in shape[:axis]:
        outer *= size
    for size in shape[axis + 1 :]:
        inner *= size
    return outer, shape[axis], inner  # (not -1: an empty shard has no size to infer from)


def measure(x, axis=1):
    """The moments of one shard, in float64 (the obvious way: the compiled kernels are tested against it).

    Args:
        x: array with channels on `axis`; may be empty.
        axis: the channel axis.

    Returns:
        Moments of the C channels.

    Example:
        >>> measure(np.array([[1.0, 5.0], [3.0, 5.0]])).mean
        array([2., 5.])
    """
    x = as_channels(np.asarray(x, dtype=np.float64), axis)
    count = x.shape[0] * x.shape[2]
    if count == 0:
        return Moments(0, np.zeros(x.shape[1]), np.zeros(x.shape[1]))
    mean = x.mean(axis=(0, 2))
    return Moments(count, mean, np.square(x - mean[:, None]).sum(axis=(0, 2)))


def combine(parts: Sequence[Moments]) -> Moments:
    """The moments of the whole batch, from those of its shards.

    Args:
        parts: at least one; those without samples change nothing.

    Returns:
        Moments of all values together: what :func:`measure` says of the concatenated shards.

    Example:
        >>> whole = combine([measure(np.array([[1.0], [2.0]])), measure(np.array([[6.0]]))])
        >>> whole.count, whole.mean.tolist(), whole.m2.tolist()
        (3, [3.0], [14.0])
    """
    count = sum(part.count for part in parts)
    # The mean moves by offsets from one shard's mean, so that shards that agree combine to exactly what they say.
    origin = next((part.mean for part in parts if part.count), parts[0].mean)
    mean = origin + sum(part.count * (part.mean - origin) for part in parts) / max(count, 1)
    m2 = sum(part.m2 + part.count * np.square(part.mean - mean) for part in parts if part.count)
    return Moments(count, mean, m2 + np.zeros_like(mean))


def pack(moments):
    """One float64 vector (1 + 2C,) of count, mean and m2: one message, so a layer waits once.

    Example:
        >>> pack(Moments(2, np.array([3.0]), np.array([4.0])))
        array([2., 3., 4.])
    """
    vector = np.empty(1 + 2 * len(moments.mean))
    vector[0] = moments.count
    vector[1 : 1 + len(moments.mean)] = moments.mean
    vector[1 + len(moments.mean) :] = moments.m2
    return vector


def unpack(vector):
    """The moments that :func:`pack` put into `vector`.

    Example:
        >>> unpack(np.array([2.0, 3.0, 4.0])).mean
        array([3.])
    """
    channels = (len(vector) - 1) // 2
    return Moments(int(vector[0]), vector[1 : 1 + channels], vector[1 + channels :])


def combine_packed(vectors):
    """:func:`combine` for packed moments: what devices and processes send each other.

    Args:
        vectors: list of (1 + 2C,) float64.

    Returns:
        (1 + 2C,) float64.
    """
    return pack(combine([unpack(vector) for vector in vectors]))


def sum_packed(vectors):
    """The sum of the backward pass's messages ``[sum dy, sum dy * (x - mean)]``, added in the order given.

    Example:
        >>> sum_packed([np.array([1.0, 2.0]), np.array([3.0, 4.0])])
        array([4., 6.])
    """
    return np.sum(vectors, axis=0)
