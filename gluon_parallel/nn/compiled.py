"""Batch norm's four passes over memory on a CPU, compiled when the first layer is made."""

from __future__ import annotations

import functools
import threading
import types

import numpy as np

from ..engine import view
from ..moments import Moments, channel_shape

_CHUNK = 4096  # values that stay in the first-level cache between the two loops over them
_lock = threading.Lock()


def _measure(x, mean, m2):
    """Moments of x (outer, C, inner) into mean, m2 (C,): every value is read from memory once.

    A chunk small enough for the cache is summed, then its squared deviations from its own mean; chunks combine like
    shards do. So no square of a large mean is ever formed, and a constant channel has m2 == 0 exactly.
    """
    outer, channels, inner = x.shape
    mean[:] = 0.0
    m2[:] = 0.0
    if inner == 1:  # channels last, or no further axes: neighbours in memory are other channels
        sums = np.empty(channels)
        deviations = np.empty(channels)
        rows = max(1, _CHUNK // max(1, channels))
        for start in range(0, outer, rows):
            stop = min(outer, start + rows)
            sums[:] = 0.0
            deviations[:] = 0.0
            block = x[start:stop]
            for n in range(len(block)):
                for c in range(channels):
                    sums[c] += np.float64(block[n, c, 0])
            sums /= stop - start
            for n in range(len(block)):
                for c in range(channels):
                    d = np.float64(block[n, c, 0]) - sums[c]
                    deviations[c] += d * d
            share = (stop - start) / stop
            for c in range(channels):
                d = sums[c] - mean[c]
                mean[c] += d * share
                m2[c] += deviations[c] + d * d * (start * share)
        return
    for n in range(outer):
        for c in range(channels):
            for start in range(0, inner, _CHUNK):
                stop = min(inner, start + _CHUNK)
                seen = n * inner + start
                chunk = x[n, c, start:stop]  # counted from 0, or Numba allows for negative indices: 7 times slower
                total = 0.0
                for i in range(chunk.size):
                    total += np.float64(chunk[i])
                average = total / chunk.size
                square = 0.0
                for i in range(chunk.size):
                    d = np.float64(chunk[i]) - average
                    square += d * d
                share = (stop - start) / (seen + stop - start)
                d = average - mean[c]
                mean[c] += d * share
                m2[c] += square + d * d * (seen * share)


def _normalise(x, y, high, low, scale, shift, add):
    """y = ((x - high) - low) * scale + shift, in x's own precision: x - high is exact near the mean."""
    outer, channels, inner = x.shape
    for n in range(outer):
        if inner == 1:
            if add:
                for c in range(channels):
                    y[n, c, 0] += ((x[n, c, 0] - high[c]) - low[c]) * scale[c] + shift[c]
            else:
                for c in range(channels):
                    y[n, c, 0] = ((x[n, c, 0] - high[c]) - low[c]) * scale[c] + shift[c]
            continue
        for c in range(channels):
            hi, lo, s, b = high[c], low[c], scale[c], shift[c]
            if add:
                for i in range(inner):
                    y[n, c, i] += ((x[n, c, i] - hi) - lo) * s + b
            else:
                for i in range(inner):
                    y[n, c, i] = ((x[n, c, i] - hi) - lo) * s + b


def _sums(x, dy, mean, total, dot):
    """total = sum dy, dot = sum dy * (x - mean) per channel, in float64."""
    outer, channels, inner = x.shape
    total[:] = 0.0
    dot[:] = 0.0
    for n in range(outer):
        if inner == 1:
            for c in range(channels):
                g = np.float64(dy[n, c, 0])
                total[c] += g
                dot[c] += g * (np.float64(x[n, c, 0]) - mean[c])
            continue
        for c in range(channels):
            m = mean[c]
            s, d = 0.0, 0.0
            for i in range(inner):
                g = np.float64(dy[n, c, i])
                s += g
                d += g * (np.float64(x[n, c, i]) - m)
            total[c] += s
            dot[c] += d


def _gradient(x, dy, dx, high, low, a, b, k, add):
    """dx = a * dy - b * (x - mean) - k."""
    outer, channels, inner = x.shape
    for n in range(outer):
        if inner == 1:
            if add:
                for c in range(channels):
                    dx[n, c, 0] += a[c] * dy[n, c, 0] - b[c] * ((x[n, c, 0] - high[c]) - low[c]) - k[c]
            else:
                for c in range(channels):
                    dx[n, c, 0] = a[c] * dy[n, c, 0] - b[c] * ((x[n, c, 0] - high[c]) - low[c]) - k[c]
            continue
        for c in range(channels):
            hi, lo, p, q, r = high[c], low[c], a[c], b[c], k[c]
            if add:
                for i in range(inner):
                    dx[n, c, i] += p * dy[n, c, i] - q * ((x[n, c, i] - hi) - lo) - r
            else:
                for i in range(inner):
                    dx[n, c, i] = p * dy[n, c, i] - q * ((x[n, c, i] - hi) - lo) - r


def _signatures(numba):
    for real in (numba.float32, numba.float64):
        x, own, wide = real[:, :, ::1], real[::1], numba.float64[::1]
        yield {
            "measure": numba.void(x, wide, wide),
            "normalise": numba.void(x, x, own, own, own, own, numba.boolean),
            "sums": numba.void(x, x, wide, wide, wide),
            "gradient": numba.void(x, x, x, own, own, own, own, own, numba.boolean),
        }


# "reassoc" lets a sum become several that run side by side, as vector instructions need. Where (x - high) - low must
# stay what it says it is withheld. Neither touches NaN and infinity.
_SUMMING = {"reassoc", "contract", "nsz"}
_EXACT = {"contract", "nsz"}
_KERNELS = {
    "measure": (_measure, _SUMMING),
    "normalise": (_normalise, _EXACT),
    "sums": (_sums, _SUMMING),
    "gradient": (_gradient, _EXACT),
}


@functools.cache
def _compiled():
    import numba  # here: half a second that only those pay who use the layer

    from ..kvstore.atoms import compiled

    kinds = list(_signatures(numba))
    return types.SimpleNamespace(**{
        name: compiled([signatures[name] for signatures in kinds], nogil=True, fastmath=fastmath)(function)
        for name, (function, fastmath) in _KERNELS.items()
    })  # fmt: skip


def kernels():
    """The compiled kernels. The first call compiles them, so it must come before several threads need them."""
    with _lock:
        return _compiled()


def _open(array, shape):
    """The array's memory as (outer, C, inner) in a precision that kernels exist for; float16 is widened to a copy."""
    memory = view(array).reshape(shape)
    return memory.astype(np.float32) if memory.dtype == np.float16 else memory


def _split(values, dtype):
    """`values` in float64 as the sum of two arrays of `dtype`, so that float32 keeps a large mean's digits."""
    high = values.astype(dtype)
    return high, (values - high).astype(dtype)


class Compiled:
    """The arithmetic of one CPU device's shard; x, y, dy, dx and parameters are NDArrays, vectors are NumPy float64.

    Args:
        axis: the channel axis.
    """

    def __init__(self, axis):
        self.axis = axis
        self.kernels = kernels()

    def read(self, parameter):
        """A parameter's value, float64."""
        return view(parameter).astype(np.float64)

    def write(self, parameter, value, req="write"):
        """Overwrite a parameter's value, or add to it if `req` is "add"."""
        if req == "add":
            view(parameter)[...] += value
        elif req != "null":
            view(parameter)[...] = value

    def measure(self, x):
        """The shard's moments."""
        x = _open(x, channel_shape(x.shape, self.axis))
        mean, m2 = np.empty(x.shape[1]), np.empty(x.shape[1])
        self.kernels.measure(x, mean, m2)
        return Moments(x.shape[0] * x.shape[2], mean, m2)

    def normalise(self, x, y, req, mean, scale, shift):
        """y = (x - mean) * scale + shift."""
        shape = channel_shape(x.shape, self.axis)
        memory, target = _open(x, shape), _open(y, shape)
        high, low = _split(mean, memory.dtype)
        scale, shift = scale.astype(memory.dtype), shift.astype(memory.dtype)
        self.kernels.normalise(memory, target, high, low, scale, shift, req == "add")
        _close(y, target)

    def sums(self, x, dy, mean):
        """(sum dy, sum dy * (x - mean)) per channel."""
        shape = channel_shape(x.shape, self.axis)
        memory, top = _open(x, shape), _open(dy, shape)
        total, dot = np.empty(memory.shape[1]), np.empty(memory.shape[1])
        self.kernels.sums(memory, top, mean, total, dot)
        return total, dot

    def gradient(self, x, dy, dx, req, mean, a, b, k):
        """dx = a * dy - b * (x - mean) - k."""
        shape = channel_shape(x.shape, self.axis)
        memory, top, target = _open(x, shape), _open(dy, shape), _open(dx, shape)
        high, low = _split(mean, memory.dtype)
        a, b, k = (factor.astype(memory.dtype) for factor in (a, b, k))
        self.kernels.gradient(memory, top, target, high, low, a, b, k, req == "add")
        _close(dx, target)


def _close(array, target):
    """Write a widened copy back; the memory of other arrays has been written to already."""
    if np.dtype(array.dtype) == np.float16:
        view(array)[...] = target.reshape(array.shape)
