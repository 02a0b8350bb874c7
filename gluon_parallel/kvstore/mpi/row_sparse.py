"""Sum of row_sparse arrays: each process sends its rows to all others, and all add up those of the same number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .operations import Operation

if TYPE_CHECKING:
    from .progress_engine import ProgressEngine


def rows_of(array: Any) -> np.ndarray:
    """The rows of a row_sparse NDArray, by number; waits for them.

    Returns:
        (n,) NumPy records of a row's ``number`` and its ``values``.

    Example:
        >>> import mxnet as mx
        >>> array = mx.nd.array([[0, 0], [1, 2], [0, 0]]).tostype("row_sparse")
        >>> rows_of(array).tolist() == [(1, [1.0, 2.0])]
        True
    """
    rows = np.empty(array.indices.shape[0], [("number", np.int64), ("values", array.dtype, array.shape[1:])])
    rows["number"], rows["values"] = array.indices.asnumpy(), array.data.asnumpy()
    return rows


def add_up(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sum of arrays that have the rows `parts`: each row that one of them has, added in their order.

    Example:
        >>> import mxnet as mx
        >>> one, two = (rows_of(mx.nd.array(rows).tostype("row_sparse")) for rows in ([[0], [1]], [[2], [3]]))
        >>> add_up([one, two])["values"].tolist()
        [[2.0], [4.0]]
    """
    numbers = np.unique(np.concatenate([part["number"] for part in parts]))
    total = np.zeros(len(numbers), parts[0].dtype)
    total["number"] = numbers
    with np.errstate(all="ignore"):  # an infinite gradient is the caller's to find
        for part in parts:
            total["values"][np.searchsorted(numbers, part["number"])] += part["values"]
    return total


def gather_rows(progress: ProgressEngine, name: bytes, form: bytes, rows: np.ndarray) -> list[np.ndarray]:
    """The `rows` of every process, by rank; waits for all.

    Args:
        progress: the progress engine of these processes.
        name, form: as of :class:`.Operation`.
        rows: (n,) NumPy records; n may differ between processes, and be 0.
    """
    counts = progress.gather(name, b"number of rows of " + form, np.array([len(rows)], np.int64))[:, 0]
    ends = np.cumsum(counts)
    everything = np.empty(ends[-1], rows.dtype)
    sizes, begins = counts * rows.itemsize, (ends - counts) * rows.itemsize
    received = [everything.view(np.uint8), sizes.tolist(), begins.tolist(), progress.mpi.BYTE]
    stages = [("Allgatherv", ([rows.view(np.uint8), progress.mpi.BYTE], received), None)]
    progress.wait(Operation(progress.everyone, name, form, stages, rows.nbytes, once=True))
    return np.split(everything, ends[:-1])
