"""Batch norm's four passes as NDArray operators, for GPUs; they run on any device."""

from __future__ import annotations

import numpy as np

from ..compat import mx
from ..moments import Moments, channel_shape


class Operators:
    """The arithmetic of one device's shard; x, y, dy, dx and parameters are NDArrays, vectors are NumPy float64.

    Args:
        axis: the channel axis.
    """

    def __init__(self, axis):
        self.axis = axis

    def read(self, parameter):
        """A parameter's value, float64."""
        return parameter.asnumpy().astype(np.float64)

    def write(self, parameter, value, req="write"):
        """Overwrite a parameter's value, or add to it if `req` is "add"."""
        value = mx.nd.array(value, ctx=parameter.context, dtype=parameter.dtype)
        if req == "add":
            parameter += value
        elif req != "null":
            parameter[:] = value

    def measure(self, x):
        """The shard's moments; deviations are taken from a value of the channel, so that large means cancel first."""
        x = self._open(x)
        count, channels = x.shape[0] * x.shape[2], x.shape[1]
        if count == 0:
            return Moments(0, np.zeros(channels), np.zeros(channels))
        pivot = x[0:1, :, 0:1]
        x = mx.nd.broadcast_sub(x, pivot)
        offset = mx.nd.mean(x, axis=(0, 2), keepdims=True)
        m2 = mx.nd.square(mx.nd.broadcast_sub(x, offset)).sum(axis=(0, 2))
        mean = pivot.asnumpy().astype(np.float64) + offset.asnumpy().astype(np.float64)
        return Moments(count, mean.reshape(channels), m2.asnumpy().astype(np.float64))

    def normalise(self, x, y, req, mean, scale, shift):
        """y = (x - mean) * scale + shift."""
        if x.size:
            centred = self._centre(x, mean)
            value = mx.nd.broadcast_mul(centred, self._vector(scale, centred))
            self._close(y, mx.nd.broadcast_add(value, self._vector(shift, centred)), req)

    def sums(self, x, dy, mean):
        """(sum dy, sum dy * (x - mean)) per channel."""
        if x.size == 0:
            return np.zeros_like(mean), np.zeros_like(mean)
        centred, dy = self._centre(x, mean), self._open(dy, like=x)
        total, dot = dy.sum(axis=(0, 2)), (dy * centred).sum(axis=(0, 2))
        return total.asnumpy().astype(np.float64), dot.asnumpy().astype(np.float64)

    def gradient(self, x, dy, dx, req, mean, a, b, k):
        """dx = a * dy - b * (x - mean) - k."""
        if x.size:
            centred, dy = self._centre(x, mean), self._open(dy, like=x)
            value = mx.nd.broadcast_mul(dy, self._vector(a, dy))
            value = value - mx.nd.broadcast_mul(centred, self._vector(b, dy))
            self._close(dx, mx.nd.broadcast_sub(value, self._vector(k, dy)), req)

    def _open(self, array, like=None):
        array = array.reshape(channel_shape((array if like is None else like).shape, self.axis))
        return array.astype("float32") if np.dtype(array.dtype) == np.float16 else array

    def _close(self, array, value, req):
        value = value.reshape(array.shape).astype(array.dtype)
        if req == "add":
            array += value
        else:
            array[:] = value

    def _vector(self, values, like):
        return mx.nd.array(values.reshape(1, -1, 1), ctx=like.context, dtype=like.dtype)

    def _centre(self, x, mean):
        """x - mean with the mean as a sum of two numbers of x's precision: the first difference is exact near it."""
        x = self._open(x)
        high = mean.astype(x.dtype)
        return mx.nd.broadcast_sub(
            mx.nd.broadcast_sub(x, self._vector(high, x)), self._vector(mean - high.astype(np.float64), x)
        )
