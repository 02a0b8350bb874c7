"""Sums of arrays over the devices of this process, in place: prepared once, started by one call.

On CPU devices the C library sums in one pass over memory, in blocks that stay in the cache, so every value crosses the
memory bus once each way. On GPUs it is MXNet's store ``device``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..compat import mx
from ..compat.array_types import narrowed, widened
from ..engine import make_plain, push, view
from ..native import function
from ..native.records import C, address_of
from .by_mxnet import HALVES, sum_each

_BLOCK_BYTES = 128 * 1024  # one block of two arrays fits a core's second-level cache
_DTYPES = {np.dtype(np.float32): C.FLOAT32, np.dtype(np.float64): C.FLOAT64, np.dtype(np.int32): C.INT32}


class CopySums:
    """Replaces each array of each list by `scale` times the sum of its list, at every call of :meth:`push`.

    Args:
        lists: lists of NDArrays that are alike, one per device. A list may be refilled; its arrays stay those of now.
        scale: a factor of the sums, for dtypes that have one.
        are_plain: the arrays are in the plain memory layout, as gradients of parameters always are.

    Attributes:
        records: addresses for :func:`push_sums`, which does what :meth:`push` does where the C library sums all lists.
        is_all_in_c: whether it does.
    """

    def __init__(self, lists: Iterable[Sequence[mx.nd.NDArray]], scale: float = 1, are_plain: bool = False) -> None:
        self._scale = scale
        copies = [list(arrays) for arrays in lists if len(arrays) > 1 or scale != 1]
        self._dense = [array for arrays in copies for array in arrays if not are_plain and _is_dense_on_cpu(array)]
        self.records: list[int] = []
        self._kept: list[Any] = []  # their memory
        self._in_python, self._others = [], []
        by_length: dict[int, list[list[mx.nd.NDArray]]] = {}
        for arrays in copies:
            if not _is_memory(arrays):
                self._others.append(arrays)
            elif np.dtype(arrays[0].dtype) not in _DTYPES:
                self._in_python.append(arrays)
            elif arrays[0].size:
                by_length.setdefault(len(arrays), []).append(arrays)
        for arrays_of_length in by_length.values():
            self._prepare(arrays_of_length)
        self.is_all_in_c = not (self._in_python or self._others or self._dense)

    def _prepare(self, lists: list[list[mx.nd.NDArray]]) -> None:
        """Make the record of lists of one length."""
        handles = np.array([array.handle.value for arrays in lists for array in arrays], np.int64)
        sizes = np.array([arrays[0].size for arrays in lists], np.int64)
        dtypes = np.array([_DTYPES[np.dtype(arrays[0].dtype)] for arrays in lists], np.int64)
        places = [arrays[number % len(arrays)].ctx for number, arrays in enumerate(lists)]  # in turn
        devices = np.array([(place.device_typeid, place.device_id) for place in places], np.int32)
        kept = handles, sizes, dtypes, devices
        record = C.CopySums(num_lists=len(lists), num_copies=len(lists[0]), scale=self._scale)
        record.handles, record.num_values, record.dtypes, record.devices = map(address_of, kept)
        self.records.append(address_of(record))
        self._kept.append((record, kept))

    def push(self, priority: int = 0) -> None:
        """Start the sums, the first lists earlier than the others; does not wait."""
        if self._dense:
            make_plain(*self._dense)
        for record in self.records:
            if push_sums(record, priority):
                mx.base.check_call(-1)
        for number, arrays in enumerate(self._in_python):
            function = functools.partial(_sum_views, arrays, self._scale)
            push(function, write=arrays, name="gluon_parallel.allreduce", priority=priority - number)
        if self._others:
            sum_each(self._others, self._scale, priority)


push_sums = function("gp_push_sums", 2, keeps_lock=True)


def _is_dense_on_cpu(array: mx.nd.NDArray) -> bool:
    return array.stype == "default" and array.ctx.device_type == "cpu"


def _is_memory(arrays: Sequence[mx.nd.NDArray]) -> bool:
    """Whether these can be added up in memory."""
    # Arrays of one device may be views of one memory, which the engine cannot tell.
    return all(map(_is_dense_on_cpu, arrays)) and len({array.ctx for array in arrays}) == len(arrays)


def _sum_views(arrays: Sequence[mx.nd.NDArray], scale: float) -> None:
    flat = [view(array).reshape(-1) for array in arrays]
    sum_rows(flat, flat, scale)


def sum_rows(rows: Sequence[np.ndarray], outs: Sequence[np.ndarray], scale: float = 1) -> None:
    """Every NumPy array in `outs` becomes `scale` times the sum of `rows`, in their order.

    Halves are added in float32 and rounded once; the rows may be halves where the outs are. All are vectors of one
    size, and may be both a row and an out.
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
