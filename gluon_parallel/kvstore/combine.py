"""Combine statistics of devices or processes, by the compiled code of `compiled_combine`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..engine.compiled.library import Library, once
from ..engine.compiled.records import address_of


@once
def library() -> Library:
    """The library of `compiled_combine`."""
    return Library(f"{__package__}.compiled_combine")


def combine(rows: np.ndarray, direction: int, function: str = "combine_statistics") -> np.ndarray:
    """Combine rows of moments in the forward pass (direction 0), of sums in the backward pass (1).

    Args:
        rows: (num, length) float64, one row for each device or process.
        direction: 0 or 1.
        function: "combine_with_headers" for messages, whose headers are combined as well.

    Returns:
        (length,) float64.
    """
    rows, (num, length) = np.ascontiguousarray(rows, np.float64), rows.shape
    result = np.empty(length)
    _function(function)(address_of(rows), num, length, direction, address_of(result))
    return result


@functools.cache
def _function(name: str) -> Any:
    return library().function(name, 5, keeps_lock=True)
