"""Combine statistics of devices or processes, by the C library."""

from __future__ import annotations

import numpy as np

from .. import native
from ..native.records import address_of


def combine(rows: np.ndarray, direction: int, messages: bool = False) -> np.ndarray:
    """Combine rows of moments in the forward pass (direction 0), of sums in the backward pass (1).

    Args:
        rows: (num, length) float64, one row for each device or process.
        direction: 0 or 1.
        messages: whether the rows have headers, which are combined as well.

    Returns:
        (length,) float64.
    """
    rows, (num, length) = np.ascontiguousarray(rows, np.float64), rows.shape
    result = np.empty(length)
    (_messages if messages else _statistics)(address_of(rows), num, length, direction, address_of(result))
    return result


_statistics = native.function("gp_combine_statistics", 5, keeps_lock=True)
_messages = native.function("gp_combine_messages", 5, keeps_lock=True)
