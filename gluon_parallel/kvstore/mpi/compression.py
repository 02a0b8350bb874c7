"""Compression of gradients between processes: 16 bits or 2 bits per value."""

import numpy as np

from ...compat.array_types import BFLOAT16, narrowed, widened

_HALVES = {"fp16": np.dtype(np.float16), "bf16": BFLOAT16}


class Plain:
    """No compression."""

    bits = 0  # per value, where values share a byte
    note = ""  # what the processes compare

    def takes(self, dtype):
        """Whether arrays of that NumPy dtype are compressed; others travel as they are."""
        return dtype.kind == "f"

    def encode(self, key, vector):
        """What travels for `vector`, a 1-D NumPy array."""
        return vector

    def decode(self, row, like):
        """A row that has travelled, as an array like `like`."""
        return row.view(like.dtype)


class Half(Plain):
    """As float16 or bfloat16; added in float32, and the sum rounded once more."""

    def __init__(self, dtype):
        self._dtype = dtype
        self.note = " as bfloat16" if dtype == BFLOAT16 else " as float16"

    def takes(self, dtype):
        return dtype.kind == "f" and dtype.itemsize > 2

    def encode(self, key, vector):
        with np.errstate(over="ignore"):
            return narrowed(vector.astype(np.float32), self._dtype)

    def decode(self, row, like):
        return widened(row.view(self._dtype)).astype(like.dtype)


class TwoBits(Plain):
    """As -threshold, 0 or +threshold; what was left out stays in a residual and is added next time. MXNet's semantics.

    Example:
        >>> two = TwoBits(0.5)
        >>> gradient = np.array([0.7, 0.3, -2.0], np.float32)
        >>> [two.decode(two.encode("k", gradient), gradient).tolist() for _ in range(2)]
        [[0.5, 0.0, -0.5], [0.5, 0.5, -0.5]]
    """

    bits = 2

    def __init__(self, threshold):
        self.threshold = threshold
        self.note = f" in 2 bits of {threshold:g}"
        self._residuals = {}

    def encode(self, key, vector):
        residual = self._residuals.setdefault(key, np.zeros(vector.shape, vector.dtype))
        residual += vector
        up, down = residual >= self.threshold, residual <= -self.threshold
        residual -= self.threshold * (up.astype(vector.dtype) - down.astype(vector.dtype))
        return np.packbits(np.concatenate([up, down]))

    def decode(self, row, like):
        signs = np.unpackbits(row)[: 2 * like.size].reshape(2, like.size).astype(like.dtype)
        return self.threshold * (signs[0] - signs[1])


def compressor(parameters):
    """What compresses after MXNet's ``compression_params``.

    Raises:
        ValueError: it has an unknown type, or a threshold that is not positive.
    """
    parameters = dict(parameters)
    kind = parameters.pop("type", None)
    if kind == "2bit":
        threshold = float(parameters.pop("threshold", 0.5))
        if threshold > 0 and not parameters:
            return TwoBits(threshold)
    elif kind in ("none", *_HALVES) and not parameters:
        return Half(_HALVES[kind]) if kind in _HALVES else Plain()
    raise ValueError(
        f"compression_params: cannot use type {kind!r} with {parameters}; expected {{'type': 'fp16'}}, "
        "{'type': 'bf16'} or {'type': '2bit', 'threshold': a positive number}"
    )
