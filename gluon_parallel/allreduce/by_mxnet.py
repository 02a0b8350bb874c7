"""Allreduce by MXNet: its store ``device`` adds up GPUs' arrays, its operators what that store does not add as well."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..compat import mx
from ..compat.array_types import BFLOAT16, as_legacy, to_device

HALVES = (np.float16, BFLOAT16)


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
    for place, arrays in enumerate(lists):
        if 0 in arrays[0].shape:
            continue
        arrays = list(map(as_legacy, arrays))
        if _are_of_gpus(arrays):
            _sum_by_store(arrays, scale, place, priority - place)
        else:
            total = sum_arrays(arrays, scale)
            for array in arrays:
                total.copyto(array)


def _are_of_gpus(arrays: Sequence[mx.nd.NDArray]) -> bool:
    return all(array.stype == "default" and array.ctx.device_type == "gpu" for array in arrays)


def _sum_by_store(arrays: Sequence[mx.nd.NDArray], scale: float, place: int, priority: int) -> None:
    first, (store, known) = arrays[0], _store_and_keys()
    with mx.autograd.pause():
        terms = [array.astype(np.float32) for array in arrays] if first.dtype in HALVES else arrays
        # A key of its own for each place in a list: sums of one key wait for each other.
        key = f"{place} {np.dtype(terms[0].dtype)} {first.shape} {[array.ctx for array in arrays]}"
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
