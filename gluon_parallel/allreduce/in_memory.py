"""Sum of vectors in memory: one pass in blocks that stay in the cache."""

import functools
from collections.abc import Sequence

import numpy as np

from ..compat.array_types import narrowed, widened
from .spread import HALVES

_BLOCK_BYTES = 128 * 1024  # one block of two arrays fits a core's second-level cache


def sum_rows(rows: Sequence[np.ndarray], outs: Sequence[np.ndarray], scale: float = 1) -> None:
    """Every NumPy array in `outs` becomes `scale` times the sum of `rows`, in their order.

    Halves are added in float32 and rounded once. An array may be both a row and an out.

    Args:
        rows, outs: lists of 1-D arrays of one size; either may be halves where the others are float32.
        scale: a number.

    Example:
        >>> out = np.zeros(2); sum_rows([np.ones(2), np.ones(2), out], [out]); out.tolist()
        [2.0, 2.0]
    """
    half = outs[0].dtype in HALVES
    wide = np.dtype(np.float32) if half else outs[0].dtype
    step = max(1, _BLOCK_BYTES // wide.itemsize)
    total = np.empty(min(step, outs[0].size), wide)
    with np.errstate(all="ignore"):  # an infinite gradient is the caller's to find, as with any MXNet operator
        for begin in range(0, outs[0].size, step):
            blocks = [widened(row[begin : begin + step]) for row in rows]
            room = total[: blocks[0].size]
            part = functools.reduce(functools.partial(np.add, out=room, dtype=wide), blocks)
            if scale != 1:
                part = np.multiply(part, wide.type(scale), out=room)
            for out in outs:
                out[begin : begin + step] = narrowed(part, out.dtype) if half else part
