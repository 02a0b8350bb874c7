"""Collective operations of MPI at one key: prepared in the agreed order, started in any, tested until they are done."""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...native import function
from ...native.records import address_of
from ..flight_recorder import RECORDER
from .shared_memory.rows import DTYPES

if TYPE_CHECKING:
    from .agreement import Circle

TWO_OR_THREE, MOST = 3, 1 << 30  # processes that send whole arrays to each other, of fewer bytes than this


def has_persistent() -> bool:
    """Whether this MPI has persistent collective operations, which came with MPI 4; one is made to see.

    The version says nothing: Open MPI 5.0 has them and calls itself MPI 3.1.
    """
    from mpi4py import MPI

    try:
        MPI.COMM_SELF.Barrier_init().Free()
    except (AttributeError, NotImplementedError):  # of mpi4py before 4.0, and of MPI before 4.0
        return False
    return True


class Operation:
    """A collective operation over the processes of `comm` at one key, called again and again.

    MPI's persistent operations are prepared in the same order everywhere and may be started in any. An MPI without them
    has nonblocking ones, whose order is agreed upon at each call. So is that of an operation that is called once.

    Args:
        circle: the :class:`.Circle` of processes that take part.
        name, form: the key, and shape and dtype in words; both as bytes.
        stages: (MPI's name of the operation, its arguments, a function to call after it or None) for each of those that
            follow each other.
        size: bytes, for the flight recorder; None if the exchange is recorded elsewhere.
        once: the operation is called once, and its arguments are the caller's own arrays.
    """

    keeps: Any = None  # what must live as long as it

    def __init__(
        self,
        circle: Circle,
        name: bytes,
        form: bytes,
        stages: Sequence[tuple[str, tuple, Callable[[], None] | None]],
        size: int | None,
        once: bool = False,
    ) -> None:
        self.name, self.form, self.size = name, form, size
        self.circle, self._progress = circle, circle.progress
        self._stages = stages
        self._persistent = self._progress.persistent and not once
        self._requests: list = []  # the persistent ones
        self._stage = 0
        self._calls: collections.deque = collections.deque()  # (before, finish); the first one is under way
        self.since = 0.0
        self._record = 0

    def call(self, before: Callable[[], None], finish: Callable[[Exception | None], None]) -> None:
        """Start the operation when those of earlier calls are done; returns at once.

        Args:
            before: called when the operation's arrays are free, to fill them.
            finish: called with None when it is done, or with the error that ended it.
        """
        self._progress.submit(functools.partial(self._take, before, finish))

    def _take(self, before: Callable[[], None], finish: Callable[[Exception | None], None]) -> None:
        if self._progress.failure is not None:
            finish(self._progress.failure)
            return
        self._calls.append((before, finish))
        if len(self._calls) == 1:
            self._begin()

    def _begin(self) -> None:
        self.since = time.monotonic()
        self._record = 0 if self.size is None else RECORDER.begin(self.name, self.size)
        self._progress.begun(self)
        self._calls[0][0]()
        self._go_on()

    def _go_on(self) -> None:
        if self._requests:
            self.agreed()
        else:
            self.circle.announce(self)

    def prepare(self) -> None:
        """Make MPI's persistent operations; all processes do so in one order."""
        if self._persistent and not self._requests:
            self._requests = [
                getattr(self.circle.comm, f"{what}_init")(*arguments) for what, arguments, _ in self._stages
            ]

    def agreed(self) -> None:
        """Start the stage that is due: all processes have come to this operation."""
        self.prepare()
        if self._requests:
            request = self._requests[self._stage]
            request.Start()
        else:
            what, arguments, _ = self._stages[self._stage]
            request = getattr(self.circle.comm, f"I{what.lower()}")(*arguments)
        self._progress.started[self] = request

    def complete(self) -> None:
        """Take note that MPI has done what was started."""
        after = self._stages[self._stage][2]
        if after is not None:
            after()
        self._stage = (self._stage + 1) % len(self._stages)
        if self._stage:
            self._go_on()
            return
        RECORDER.end(self._record)
        self._progress.waiting.pop(self, None)
        self._calls.popleft()[1](None)
        if self._calls and self._progress.failure is None:
            self._begin()

    def abandon(self, error: Exception) -> None:
        """End all calls with `error`; MPI may still write to the arrays."""
        calls, self._calls = self._calls, collections.deque()
        for _, finish in calls:
            finish(error)

    def used_by_mpi(self) -> tuple:
        """What must live until MPI is done with it, without the progress engine."""
        return self._requests, [arguments for _, arguments, _ in self._stages], self.keeps

    def ranks_missing(self) -> set[int]:
        """Those that are not known to have come."""
        number = self._progress.counts[self.name].get(self.form, 1)
        return self._progress.lost.ranks_behind(self, self.circle.ranks, number)


def allreduce(
    circle: Circle, name: bytes, form: bytes, result: np.ndarray, source: np.ndarray | None = None
) -> Operation:
    """The operation by which `result` becomes the sum over the processes.

    It is the sum of the arrays `source`, or of `result` itself. Open MPI sums a large array along a tree where it is
    summed in place, and between two or three processes. Otherwise it is a reduce-scatter and an allgather.
    """
    if source is not None and are_few(circle, source):
        return _sum_of_few(circle, name, form, result, source)
    mpi = circle.progress.mpi
    stages = [("Allreduce", (mpi.IN_PLACE if source is None else source, result, mpi.SUM), None)]
    return Operation(circle, name, form, stages, result.nbytes)


def are_few(circle: Circle, source: np.ndarray) -> bool:
    """Whether so few processes sum such an array that each sends its whole array to the others."""
    return len(circle.ranks) <= TWO_OR_THREE and source.nbytes < MOST


def _sum_of_few(circle: Circle, name: bytes, form: bytes, result: np.ndarray, source: np.ndarray) -> Operation:
    """The same between two or three, who add up all arrays in one order."""
    operation, addresses = exchange_of_few(circle, name, form, source)
    dtype = DTYPES.index(source.dtype)

    def add_up() -> None:
        _sum_arrays(-1, dtype, dtype, address_of(addresses), len(addresses), address_of(result), source.size)

    operation._stages = [(what, arguments, add_up) for what, arguments, _ in operation._stages]
    return operation


def exchange_of_few(circle: Circle, name: bytes, form: bytes, source: np.ndarray) -> tuple[Operation, np.ndarray]:
    """The operation by which each gets the arrays of all, and where they are then, by rank: addresses, (processes,)."""
    num, place, mpi = len(circle.ranks), circle.place, circle.progress.mpi
    others = np.empty((num - 1, source.size), source.dtype)
    rows = [*others[:place], source, *others[place:]]
    sizes = [0 if other == place else source.nbytes for other in range(num)]
    outgoing = [bytes_of(source), sizes, [0] * num, mpi.BYTE]
    incoming = [bytes_of(others), sizes, [sum(sizes[:other]) for other in range(num)], mpi.BYTE]
    operation = Operation(circle, name, form, [("Alltoallv", (outgoing, incoming), None)], source.nbytes)
    return operation, np.array([address_of(row) for row in rows])


def broadcast(circle: Circle, name: bytes, form: bytes, array: np.ndarray) -> Operation:
    """The same, to be called once: `array` becomes that of the first process."""
    arguments = [bytes_of(array), circle.progress.mpi.BYTE], 0
    return Operation(circle, name, form, [("Bcast", arguments, None)], array.nbytes, once=True)


def allgather(circle: Circle, name: bytes, form: bytes, rows: np.ndarray) -> Operation:
    """The same: each row of `rows` becomes that of its process."""
    mpi = circle.progress.mpi
    arguments = mpi.IN_PLACE, [bytes_of(rows), rows[0].nbytes, mpi.BYTE]
    return Operation(circle, name, form, [("Allgather", arguments, None)], rows[0].nbytes)


def bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


_sum_arrays = function("gp_sum_arrays", 7)
