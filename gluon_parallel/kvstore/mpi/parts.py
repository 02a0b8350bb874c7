"""Arrays of which every process has a part: what exchanges them in shared memory, and their gathering by MPI."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...compat import mx
from ...compat.array_types import to_device
from ...engine import make_plain, push_async, view
from ..contract import Arrays, Bounds, Keys
from .agreement import key_of
from .buckets import plan
from .operations import Operation
from .shared_memory.rows import PARTS

if TYPE_CHECKING:
    from .store import MPI


def exchange_in_shared_memory(
    store: MPI, keys: Keys, arrays: Arrays, bounds: Bounds, stages: Sequence[tuple[bool, bool]]
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
        if is_taken and _are_on_host(outs) and (gathers or not store._compresses(key, outs[0])):
            found.setdefault(np.dtype(outs[0].dtype).name, []).append(number)
        else:
            others.append(number)
    for dtype, numbers in found.items():
        chosen = [arrays[one] for one in numbers], [bounds[one] for one in numbers]
        parts = shared.parts(f"{store._number}a:arrays of {dtype}".encode(), dtype)
        if not parts.knows(*chosen, *stages[0]):  # its rows are those of all arrays: nothing else compares these
            store._compare_once([keys[one] for one in numbers], *chosen)
        store.parts.add(parts)
        parts.exchange_parts(*chosen, stages)
    return others


def gather_by_mpi(store: MPI, keys: Keys, arrays: Arrays, bounds: Bounds) -> None:
    """:meth:`.Contract.gather_parts` by MPI; small arrays travel together."""
    sizes = [outs[0].size * np.dtype(outs[0].dtype).itemsize for outs in arrays]
    kinds = [(np.dtype(outs[0].dtype).name, len(outs)) for outs in arrays]
    for numbers in plan(sizes, kinds, range(len(arrays))):
        outs, ends = [arrays[number] for number in numbers], [bounds[number] for number in numbers]
        ours = [store._names("a", keys[number], arrays[number][0]) for number in numbers]
        last = f" to {keys[numbers[-1]]}" * (len(ours) > 1)
        name, signature = ours[0][0] + last.encode(), b", ".join(signature for _, signature in ours)
        _gather_together(store, name, signature, outs, ends)


def _gather_together(store: MPI, name: bytes, signature: bytes, arrays: Arrays, bounds: Bounds) -> None:
    """Arrays that travel together get the parts of all processes; returns at once."""
    group = store._progress.everyone
    on_host = [outs if _are_on_host(outs) else [to_device(outs[0], mx.cpu())] for outs in arrays]
    make_plain(*itertools.chain.from_iterable(on_host))
    # Of each process, (number of an array, its bytes) of what it has.
    parts: list[list[tuple[int, slice]]] = [[] for _ in group.ranks]
    for number, (outs, places) in enumerate(zip(arrays, bounds)):
        ends = [place * np.dtype(outs[0].dtype).itemsize for place in places]
        for mine, begin, end in zip(parts, ends, ends[1:]):
            mine += [(number, slice(begin, end))] if begin < end else []
    sizes = [sum(part.stop - part.start for _, part in mine) for mine in parts]
    signature += f" in parts of {sizes} bytes".encode()
    begins = [sum(sizes[:place]) for place in range(len(sizes))]

    def operation_on(memory: np.ndarray, once: bool) -> Operation:
        mpi = group.progress.mpi
        stages = [("Allgatherv", (mpi.IN_PLACE, [memory, sizes, begins, mpi.BYTE]), None)]
        return Operation(group, name, signature, stages, sizes[group.place], once)

    def make() -> tuple[np.ndarray, Operation]:
        memory = np.zeros(sum(sizes), np.uint8)
        return memory, operation_on(memory, once=False)

    def ready(done: Callable[..., None]) -> None:
        views = [[view(array).reshape(-1).view(np.uint8) for array in outs] for outs in on_host]
        if len(views) == 1:  # a large array, as a rule: it needs no other memory
            memory, operation = np.empty(0, np.uint8), operation_on(views[0][0], once=True)
            operation.keeps = on_host  # MPI may write to them until it has ended, even after an error here
        else:
            memory, operation = store._operation(make, name, signature)

        def parts_of(place: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            """(bytes in the memory, bytes of an array) of each part of a process."""
            begin = begins[place]
            for number, part in parts[place]:
                end = begin + part.stop - part.start
                yield memory[begin:end], views[number][0][part]
                begin = end

        def fill() -> None:
            for held, part in parts_of(group.place) if len(views) > 1 else ():
                held[:] = part

        def end(error: Exception | None) -> None:
            for place in range(len(parts)) if len(views) > 1 and error is None else ():
                for held, part in parts_of(place):
                    part[:] = held
            for first, *copies in views:
                if error is not None:
                    first.fill(0xFF)  # not a number: nobody must train on with half of the weights
                for copy in copies:
                    copy[:] = first
            done(error)

        operation.call(fill, end)

    written = [*itertools.chain.from_iterable(on_host), store._order(name)]
    push_async(ready, write=written, device=mx.cpu(), name=f"gluon_parallel.mpi {key_of(name)}")
    for outs, staged in zip(arrays, on_host):
        for out in outs if staged is not outs else ():
            staged[0].copyto(out)


def _are_on_host(arrays: Sequence[Any]) -> bool:
    return all(array.ctx.device_type != "gpu" for array in arrays)
