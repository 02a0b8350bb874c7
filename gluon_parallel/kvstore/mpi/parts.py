"""Arrays of which every process has a part: their exchange in the shared memory of one host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..contract import Arrays, Bounds, Keys
from .shared_memory.rows import PARTS


def exchange_in_shared_memory(
    store: Any, keys: Keys, arrays: Arrays, bounds: Bounds, stages: Sequence[tuple[bool, bool]]
) -> list[int]:
    """Sum and gather parts of arrays in the memory of the only host, where they can be.

    Args:
        store: the store.
        keys, arrays, bounds: as of :meth:`.Contract.gather_parts`.
        stages: (gathers, releases) of each :meth:`.SharedParts.exchange_parts`, one after the other.

    Returns:
        The places of the keys whose arrays are not exchanged here.
    """
    store.check()
    for parts in store.parts:
        if parts.knows(arrays, bounds, *stages[0]):  # all of them, which need no second look
            parts.exchange_parts(arrays, bounds, stages)
            return []
    shared, gathers = store._progress.shared, stages[0][0]
    found: dict[str, list[int]] = {}
    others = []
    for number, (key, outs) in enumerate(zip(keys, arrays)):
        store._check(key, outs)
        is_taken = shared is not None and shared.num_hosts == 1 and outs[0].dtype in PARTS and outs[0].size
        if is_taken and are_on_host(outs) and (gathers or not store._compresses(key, outs[0])):
            found.setdefault(np.dtype(outs[0].dtype).name, []).append(number)
        else:
            others.append(number)
    for dtype, numbers in found.items():
        chosen = [arrays[one] for one in numbers], [bounds[one] for one in numbers]
        parts = shared.parts(f"{store._number}a:arrays of {dtype}".encode(), dtype)
        if not parts.knows(*chosen, *stages[0]):  # its rows are those of all arrays: nothing else compares these
            store.compare_once([keys[one] for one in numbers], *chosen)
        store.parts.add(parts)
        parts.exchange_parts(*chosen, stages)
    return others


def are_on_host(arrays: Sequence[Any]) -> bool:
    return all(array.ctx.device_type != "gpu" for array in arrays)
