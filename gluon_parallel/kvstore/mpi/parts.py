"""Gathering of arrays of which every process has a part, by MPI's own operation over all processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...compat import mx
from ...compat.array_types import to_device
from ...engine import make_plain, push_async, view
from .buckets import plan
from .operations import Operation

if TYPE_CHECKING:
    from .agreement import Circle


def gather_parts(
    circle: Circle,
    prefix: str,
    arrays: Sequence[tuple[Hashable, Sequence[Any], Sequence[int]]],
    operations: dict,
    turns: dict,
) -> None:
    """Each array gets the parts of all processes; returns at once. Small ones travel together.

    Args:
        circle: the processes.
        prefix: of the names of the exchanges.
        arrays: (key, its NDArrays, bounds), as of :meth:`.Contract.gather_parts`.
        operations, turns: of the store, by name.
    """
    sizes = [outs[0].size * np.dtype(outs[0].dtype).itemsize for _, outs, _ in arrays]
    for numbers in plan(sizes, ["parts"] * len(arrays), range(len(arrays))):
        _gather_together(circle, prefix, [arrays[number] for number in numbers], operations, turns)


def _gather_together(circle: Circle, prefix: str, arrays: Sequence[tuple], operations: dict, turns: dict) -> None:
    on_host = [outs if _are_on_host(outs) else [to_device(outs[0], mx.cpu())] for _, outs, _ in arrays]
    make_plain(*itertools.chain.from_iterable(on_host))
    keys, firsts = [key for key, _, _ in arrays], [outs[0] for outs in on_host]
    name = f"{prefix}{keys[0]}" + f" to {keys[-1]}" * (len(keys) > 1)
    # Of each process, (number of an array, its bytes) of what it has.
    parts: list[list[tuple[int, slice]]] = [[] for _ in circle.ranks]
    for number, (first, (_, _, bounds)) in enumerate(zip(firsts, arrays)):
        ends = [bound * np.dtype(first.dtype).itemsize for bound in bounds]
        for mine, begin, end in zip(parts, ends, ends[1:]):
            mine += [(number, slice(begin, end))] if begin < end else []
    sizes = [sum(part.stop - part.start for _, part in mine) for mine in parts]
    form = ", ".join(f"{np.dtype(first.dtype).name} {first.shape}" for first in firsts) + f" in parts of {sizes} bytes"
    begins = [sum(sizes[:place]) for place in range(len(sizes))]

    def operation_on(memory: np.ndarray, once: bool) -> Operation:
        mpi = circle.progress.mpi
        stages = [("Allgatherv", (mpi.IN_PLACE, [memory, sizes, begins, mpi.BYTE]), None)]
        return Operation(circle, name.encode(), form.encode(), stages, sizes[circle.place], once)

    def ready(done: Callable[..., None]) -> None:
        views = [[view(array).reshape(-1).view(np.uint8) for array in outs] for outs in on_host]
        if len(views) == 1:  # a large array, as a rule: it needs no other memory
            memory, operation = np.empty(0, np.uint8), operation_on(views[0][0], once=True)
            operation.keeps = on_host  # MPI may write to them until it has ended, even after an error here
        else:
            if (name, form) not in operations:
                made = np.zeros(sum(sizes), np.uint8)
                operations[name, form] = made, operation_on(made, once=False)
            memory, operation = operations[name, form]

        def places(place: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            """(bytes in the memory, bytes of an array) of each part of a process."""
            begin = begins[place]
            for number, part in parts[place]:
                end = begin + part.stop - part.start
                yield memory[begin:end], views[number][0][part]
                begin = end

        def fill() -> None:
            for held, part in places(circle.place) if len(views) > 1 else ():
                held[:] = part

        def end(error: Exception | None) -> None:
            for place in range(len(parts)) if len(views) > 1 and error is None else ():
                for held, part in places(place):
                    part[:] = held
            for first, *copies in views:
                if error is not None:
                    first.fill(0xFF)  # not a number: nobody must train on with half of the weights
                for copy in copies:
                    copy[:] = first
            done(error)

        operation.call(fill, end)

    if name not in turns:
        turns[name] = mx.nd.zeros(1, ctx=mx.cpu())  # all exchanges of the name write it, so that they keep their order
    written = [*itertools.chain.from_iterable(on_host), turns[name]]
    push_async(ready, write=written, device=mx.cpu(), name=f"gluon_parallel.mpi {name}")
    for (_, outs, _), staged in zip(arrays, on_host):
        for out in outs if staged is not outs else ():
            staged[0].copyto(out)


def _are_on_host(arrays: Sequence[Any]) -> bool:
    return all(array.ctx.device_type != "gpu" for array in arrays)
