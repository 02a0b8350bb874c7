"""Compression of gradients between processes: 16 bits or 2 bits per value."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...compat.array_types import BFLOAT16, narrowed, widened

_HALVES = {"fp16": np.dtype(np.float16), "bf16": BFLOAT16}


class Half:
    """As float16 or bfloat16; added in float32, and the sum rounded once more."""

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype
        self.note = " as bfloat16" if dtype == BFLOAT16 else " as float16"  # what the processes compare

    def takes(self, dtype: np.dtype) -> bool:
        """Whether arrays of that NumPy dtype are compressed; others travel as they are."""
        return dtype.kind == "f" and dtype.itemsize > 2

    def num_bytes(self, num: int) -> int:
        """Of so many values."""
        return num * self._dtype.itemsize

    def dtype_of_sum(self, num_processes: int, small: bool) -> np.dtype:
        """As what the sum of arrays over so many processes travels; that of small ones is not rounded."""
        return np.dtype(np.float32) if small else self._dtype

    def encode(self, vector: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """What travels for `vector`, a 1-D NumPy array, as bytes; `residual` is for what is left out: nothing here."""
        same = vector.dtype == self._dtype
        return (vector if same else narrowed(vector.astype(np.float32), self._dtype)).view(np.uint8)

    def decode(self, piece: np.ndarray, num: int) -> np.ndarray:
        """What has travelled, so many values, as it is added."""
        return widened(piece.view(self._dtype))

    def encode_sum(self, total: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """What travels for the sum, as :meth:`dtype_of_sum` says."""
        return total if dtype == total.dtype else narrowed(total, dtype)

    def decode_sum(self, sums: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """The sums that have travelled, in the dtype of the arrays."""
        if sums.dtype == dtype:
            return sums
        wide = widened(sums)
        return narrowed(wide, dtype) if dtype.itemsize == 2 else wide.astype(dtype)


class TwoBits:
    """As -threshold, 0 or +threshold; what was left out stays in a residual and is added next time. MXNet's semantics.

    The sum over up to 127 processes takes 8 bits per value, over more of them 16.

    Example:
        >>> two = TwoBits(0.5)
        >>> gradient, residual = np.array([0.7, 0.3, -2.0], np.float32), np.zeros(3, np.float32)
        >>> [(0.5 * two.decode(two.encode(gradient, residual), 3)).tolist() for _ in range(3)]
        [[0.5, 0.0, -0.5], [0.5, 0.5, -0.5], [0.5, 0.0, -0.5]]
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.note = f" in 2 bits of {threshold:g}"

    def takes(self, dtype: np.dtype) -> bool:
        return dtype.kind == "f"

    def num_bytes(self, num: int) -> int:
        return (2 * num + 7) // 8

    def dtype_of_sum(self, num_processes: int, small: bool) -> np.dtype:
        return np.dtype(np.int8 if num_processes < 128 else np.int16)

    def encode(self, vector: np.ndarray, residual: np.ndarray) -> np.ndarray:
        residual += widened(vector) if vector.dtype == BFLOAT16 else vector
        up, down = residual >= self.threshold, residual <= -self.threshold
        residual -= self.threshold * (up.astype(residual.dtype) - down.astype(residual.dtype))
        return np.packbits(np.concatenate([up, down]))

    def decode(self, piece: np.ndarray, num: int) -> np.ndarray:
        up, down = np.unpackbits(piece)[: 2 * num].reshape(2, num).astype(np.int16)
        return up - down

    def encode_sum(self, total: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return total.astype(dtype)

    def decode_sum(self, sums: np.ndarray, dtype: np.dtype) -> np.ndarray:
        values = self.threshold * sums.astype(np.float32)
        return narrowed(values, dtype) if dtype == BFLOAT16 else values.astype(dtype)


def compressor(parameters: Any) -> Half | TwoBits | None:
    """What compresses after MXNet's ``compression_params``, or None.

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
        return Half(_HALVES[kind]) if kind in _HALVES else None
    raise ValueError(
        f"compression_params: cannot use type {kind!r} with {parameters}; expected {{'type': 'fp16'}}, "
        "{'type': 'bf16'} or {'type': '2bit', 'threshold': a positive number}"
    )
