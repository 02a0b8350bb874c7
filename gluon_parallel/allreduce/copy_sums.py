"""Sums of arrays over the devices of this process, in place: prepared once, started by one call.

On CPU devices the C library sums in one pass over memory, in blocks that stay in the cache, so every value crosses the
memory bus once each way. MXNet's store ``device`` sums on GPUs, and its operators what neither sums.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..mxnet.arrays import addresses_of
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import BFLOAT16, as_legacy, narrowed, to_device, widened
from ..mxnet.engine import make_plain, push, view
from ..mxnet.library import check_call
from ..native import function
from ..native.records import C, address_of

HALVES = (np.float16, BFLOAT16)
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
        handles = np.array(addresses_of(array for arrays in lists for array in arrays), np.int64)
        sizes = np.array([arrays[0].size for arrays in lists], np.int64)
        dtypes = np.array([_DTYPES[np.dtype(arrays[0].dtype)] for arrays in lists], np.int64)
        contexts = [arrays[number % len(arrays)].ctx for number, arrays in enumerate(lists)]  # in turn
        devices = np.array([(one.device_typeid, one.device_id) for one in contexts], np.int32)
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
                check_call(-1)
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


def sum_arrays(arrays: Sequence[mx.nd.NDArray], scale: float = 1) -> mx.nd.NDArray:
    """`scale` times the sum of ``mx.nd`` arrays in their order, on the first one's device; does not wait.

    They are alike in shape, dtype and storage type. Dense halves are added in float32 and rounded once. The sum of one
    array alone, without a scale, is that array itself.
    """
    first = arrays[0]
    half = first.dtype in HALVES and first.stype == "default"
    with mx.autograd.pause():
        terms = [to_device(array, first.ctx) for array in arrays]
        if len(arrays) == 1 and scale == 1:
            return first
        if half:
            terms = [term.astype(np.float32) for term in terms]
        # `elemwise_add` would hold a temporary buffer until its arrays are there, and other keys would wait for it.
        total = functools.reduce(mx.nd.broadcast_add if first.stype == "default" else mx.nd.elemwise_add, terms)
        if scale != 1:
            total = total * scale
        return total.astype(first.dtype) if half else total


def sum_each(lists: Iterable[Sequence[mx.nd.NDArray]], scale: float = 1, priority: int = 0) -> None:
    """In each list, every array becomes `scale` times the sum of all; the arrays of a list are known to be alike."""
    for number, arrays in enumerate(lists):
        if 0 in arrays[0].shape:
            continue
        arrays = list(map(as_legacy, arrays))
        if _are_of_gpus(arrays):
            _sum_by_store(arrays, scale, number, priority - number)
        else:
            total = sum_arrays(arrays, scale)
            for array in arrays:
                total.copyto(array)


def _are_of_gpus(arrays: Sequence[mx.nd.NDArray]) -> bool:
    return all(array.stype == "default" and array.ctx.device_type == "gpu" for array in arrays)


def _sum_by_store(arrays: Sequence[mx.nd.NDArray], scale: float, number: int, priority: int) -> None:
    first, (store, known) = arrays[0], _store_and_keys()
    with mx.autograd.pause():
        terms = [array.astype(np.float32) for array in arrays] if first.dtype in HALVES else arrays
        # A key of its own for each number in a list: sums of one key wait for each other.
        key = f"{number} {np.dtype(terms[0].dtype)} {first.shape} {[array.ctx for array in arrays]}"
        if key not in known:
            store.init(key, terms[0])
            known.add(key)
        store.pushpull(key, terms, priority=priority)
        for array, term in zip(arrays, terms):
            if scale != 1:
                term *= scale
            if term is not array:
                term.astype(first.dtype).copyto(array)


@functools.cache
def _store_and_keys() -> tuple[Any, set[str]]:
    return mx.kv.create("device"), set()
