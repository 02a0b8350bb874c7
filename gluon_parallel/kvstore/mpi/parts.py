"""Gathering of arrays of which every process has a part, by MPI's own operation over all processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...compat import mx
from ...compat.array_types import to_device
from ...engine import make_plain, push_async, view
from .agreement import key_of
from .operations import Operation

if TYPE_CHECKING:
    from .agreement import Circle


def gather_parts(
    circle: Circle,
    name: bytes,
    form: bytes,
    arrays: Sequence[Sequence[Any]],
    bounds: Sequence[Sequence[int]],
    operations: dict,
    turn: Any,
) -> None:
    """Arrays that travel together get the parts of all processes; returns at once.

    Args:
        circle: the processes.
        name, form: of the exchange, without the division.
        arrays, bounds: as of :meth:`.Contract.gather_parts`.
        operations: of the store, by name.
        turn: the array that all exchanges of the name write, so that they keep their order.
    """
    on_host = [outs if _are_on_host(outs) else [to_device(outs[0], mx.cpu())] for outs in arrays]
    make_plain(*itertools.chain.from_iterable(on_host))
    # Of each process, (number of an array, its bytes) of what it has.
    parts: list[list[tuple[int, slice]]] = [[] for _ in circle.ranks]
    for number, (outs, places) in enumerate(zip(arrays, bounds)):
        ends = [place * np.dtype(outs[0].dtype).itemsize for place in places]
        for mine, begin, end in zip(parts, ends, ends[1:]):
            mine += [(number, slice(begin, end))] if begin < end else []
    sizes = [sum(part.stop - part.start for _, part in mine) for mine in parts]
    form += f" in parts of {sizes} bytes".encode()
    begins = [sum(sizes[:place]) for place in range(len(sizes))]

    def operation_on(memory: np.ndarray, once: bool) -> Operation:
        mpi = circle.progress.mpi
        stages = [("Allgatherv", (mpi.IN_PLACE, [memory, sizes, begins, mpi.BYTE]), None)]
        return Operation(circle, name, form, stages, sizes[circle.place], once)

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

        def parts_of(place: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            """(bytes in the memory, bytes of an array) of each part of a process."""
            begin = begins[place]
            for number, part in parts[place]:
                end = begin + part.stop - part.start
                yield memory[begin:end], views[number][0][part]
                begin = end

        def fill() -> None:
            for held, part in parts_of(circle.place) if len(views) > 1 else ():
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

    written = [*itertools.chain.from_iterable(on_host), turn]
    push_async(ready, write=written, device=mx.cpu(), name=f"gluon_parallel.mpi {key_of(name)}")
    for outs, staged in zip(arrays, on_host):
        for out in outs if staged is not outs else ():
            staged[0].copyto(out)


def _are_on_host(arrays: Sequence[Any]) -> bool:
    return all(array.ctx.device_type != "gpu" for array in arrays)
