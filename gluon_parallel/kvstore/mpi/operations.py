"""Collective operations of MPI at one key: prepared in the agreed order, started in any, tested until they are done."""

from __future__ import annotations

import collections
import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...mxnet.compat.array_types import BFLOAT16
from ...native import function
from ...native.records import address_of
from ..flight_recorder import RECORDER

if TYPE_CHECKING:
    from .agreement import ProcessGroup

DTYPES = *map(np.dtype, ("float32", "float64", "int32", "float16")), BFLOAT16  # by their numbers in `sums.h`
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
        group: the :class:`.ProcessGroup` of processes that take part.
        name, signature: the key, and shape and dtype in words; both as bytes.
        stages: (MPI's name of the operation, its arguments, a function to call after it or None) for each of those that
            follow each other.
        size: bytes, for the flight recorder; None if the exchange is recorded elsewhere.
        once: the operation is called once, and its arguments are the caller's own arrays.
    """

    keeps: Any = None  # what must live as long as it

    def __init__(
        self,
        group: ProcessGroup,
        name: bytes,
        signature: bytes,
        stages: Sequence[tuple[str, tuple, Callable[[], None] | None]],
        size: int | None,
        once: bool = False,
    ) -> None:
        self.name, self.signature, self.size = name, signature, size
        self.group, self._progress = group, group.progress
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
            self.group.announce(self)

    def agreed(self) -> None:
        """Start the stage that is due: all processes have come to this operation, in one order."""
        comm = self.group.comm
        if self._persistent and not self._requests:
            self._requests = [getattr(comm, f"{what}_init")(*arguments) for what, arguments, _ in self._stages]
        if self._requests:
            request = self._requests[self._stage]
            request.Start()
        else:
            what, arguments, _ = self._stages[self._stage]
            request = getattr(comm, f"I{what.lower()}")(*arguments)
        self._progress.started.append((request, self))

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
        number = self._progress.counts[self.name].get(self.signature, 1)
        return self._progress.lost.ranks_behind(self, self.group.ranks, number)


class PairwiseExchange(Operation):
    """The operation by which each process gets the arrays of all, whole.

    It is made of sends and receives: their addresses may change from call to call, those of collective operations not.

    Args:
        group, name, signature: as of an :class:`Operation`; it is made in the same order everywhere.
        source: (n,), what this process sends.
        result: (n,), becomes the sum; without it, the caller adds up.

    Attributes:
        rows: where the arrays of all are, by rank, or between two processes this one's first: addresses, (processes,).
            Before a call, this process's may be set to the address of another array.
    """

    def __init__(
        self, group: ProcessGroup, name: bytes, signature: bytes, source: np.ndarray, result: np.ndarray | None = None
    ) -> None:
        super().__init__(group, name, signature, [("", (), None if result is None else self._add_up)], source.nbytes)
        num, mpi, self._tag = len(group.ranks), group.progress.mpi, next(group.tags)
        self._others = [rank for rank in range(num) if rank != group.rank]
        self._own = 0 if num == 2 else group.rank
        self._source, self._result, self._sent_from = source, result, 0
        arrays = self._arrays = [np.empty_like(source) for _ in self._others]
        self.rows = np.array([address_of(row) for row in (*arrays[: self._own], source, *arrays[self._own :])])
        self._receives = [
            group.comm.Recv_init([bytes_of(array), mpi.BYTE], rank, self._tag)
            for rank, array in zip(self._others, arrays)
        ]

    def _go_on(self) -> None:  # what the others send meanwhile waits, so nothing is to be agreed upon
        mpi, address = self._progress.mpi, int(self.rows[self._own])
        if address != self._sent_from:
            for request in self._requests[: -len(self._receives)]:
                request.Free()
            values = [(ctypes.c_char * self._source.nbytes).from_address(address), mpi.BYTE]
            sends = [self.group.comm.Send_init(values, rank, self._tag) for rank in self._others]
            self._requests, self._sent_from = [*sends, *self._receives], address
        mpi.Prequest.Startall(self._requests)  # sends first: 25 MB at 1 Gbit/s take 213 ms, else 243 to 402
        self._progress.started += ((request, self) for request in self._requests)

    def _add_up(self) -> None:
        dtype, size = DTYPES.index(self._source.dtype), self._source.size
        _sum_arrays(-1, dtype, dtype, address_of(self.rows), len(self.rows), address_of(self._result), size)

    def used_by_mpi(self) -> tuple:
        return *super().used_by_mpi(), self._source, self._arrays


def allreduce(
    group: ProcessGroup, name: bytes, signature: bytes, result: np.ndarray, source: np.ndarray | None = None
) -> Operation:
    """The operation by which `result` becomes the sum over the processes.

    It is the sum of the arrays `source`, or of `result` itself. Open MPI sums a large array along a tree where it is
    summed in place, and between two or three processes. Otherwise it is a reduce-scatter and an allgather.
    """
    if source is not None and are_few(group, source):
        return PairwiseExchange(group, name, signature, source, result)
    mpi = group.progress.mpi
    stages = [("Allreduce", (mpi.IN_PLACE if source is None else source, result, mpi.SUM), None)]
    return Operation(group, name, signature, stages, result.nbytes)


def are_few(group: ProcessGroup, source: np.ndarray) -> bool:
    """Whether so few processes sum such an array that each sends its whole array to the others."""
    return len(group.ranks) <= TWO_OR_THREE and source.nbytes < MOST


def bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


_sum_arrays = function("gp_sum_arrays", 7)
