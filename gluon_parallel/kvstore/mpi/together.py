"""Sums over hosts of small arrays, each at a key of its own: those that are ready at the same time travel together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .agreement import Circle


class SmallSum:
    """The sum of one key's array, one call at a time; the processes agree on which ones travel together.

    Args:
        circle: the processes.
        name, form: the key, and shape and dtype in words; both as bytes.
        result, source: NumPy arrays (n,); the first becomes the sum of all processes' second.
        record: address of the ``HostKey``, for the C library.
    """

    travels_together = True

    def __init__(
        self, circle: Circle, name: bytes, form: bytes, result: np.ndarray, source: np.ndarray, record: int
    ) -> None:
        self.circle, self.name, self.form = circle, name, form
        self.result, self.source, self.record = result, source, record
        self.number = 0  # of the call
        self.since = 0.0

    def start(self, number: int) -> None:
        """Have the call of that number begin."""
        self.number = number
        self.circle.progress.submit_small(self)

    def begin(self, now: float) -> None:
        """Tell the others that this process has come to it."""
        self.since = now
        self.circle.progress.begun(self)
        self.circle.announce(self)

    def agreed(self) -> None:
        """Nothing: it is started with the others of its batch."""

    def abandon(self, error: Exception) -> None:
        """Nothing: the shared memory ends its exchange."""

    def ranks_missing(self) -> set[int]:
        """Those that are not known to have come."""
        number = self.circle.progress.counts[self.name].get(self.form, 1)
        return self.circle.progress.lost.ranks_behind(self, self.circle.ranks, number)


class _Batch:
    """One operation of MPI for several sums of one dtype; all processes start it at the same place in their order."""

    def __init__(self, circle: Circle, sums: Sequence[SmallSum], done: Callable[[list[int], list[int]], None]) -> None:
        self._sums, self._progress, self._done = sums, circle.progress, done
        self._memory = np.concatenate([one.source for one in sums])
        mpi = circle.progress.mpi
        circle.progress.started[self] = circle.comm.Iallreduce(mpi.IN_PLACE, self._memory, mpi.SUM)

    def complete(self) -> None:
        """Take note that MPI has done it."""
        begin = 0
        for one in self._sums:
            end = begin + len(one.source)
            one.result[:] = self._memory[begin:end]
            begin = end
            self._progress.waiting.pop(one, None)
        self._done([one.record for one in self._sums], [one.number for one in self._sums])

    def used_by_mpi(self) -> tuple:
        """What must live until MPI is done with it."""
        return (self._memory,)


def start_together(circle: Circle, sums: Sequence[SmallSum]) -> None:
    """Start sums to which all processes have come, those of each dtype by one operation."""

    def dtype(one: SmallSum) -> str:
        return one.source.dtype.str

    for _, members in itertools.groupby(sorted(sums, key=dtype), dtype):
        _Batch(circle, list(members), circle.progress.shared.summed)
