"""Allgather of small vectors between the processes of one host, through shared memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from typing import Any

import numpy as np

from ....native import function, locked, new_mutex, unlocked
from ....native.records import C, address_of
from .rows import LINE, Rows


class SharedGather(Rows):
    """Allgather at one key: every process gets the vectors of all; calls have one order on all processes."""

    kind = "gather"

    def __init__(self, shared: Any, name: bytes, signature: bytes, shape: tuple[int, ...], dtype: np.dtype) -> None:
        super().__init__(shared, name, signature, shape, dtype)
        self.record.num_values *= dtype.itemsize  # bytes
        self._mutex = new_mutex()  # the C library holds it too
        self.num_processes = len(shared.members)
        self._announced, self._agreed = False, threading.Event()
        self._first: np.ndarray | None = None  # vector of the first call
        # of a `Processes`
        self.addresses = tuple(map(address_of, (self._mutex, shared.host, self.record)))

    def gather(self, vector: np.ndarray, has_begun: bool = False) -> np.ndarray:
        """The `vector` of each process of this host, by rank, (processes, *shape).

        `has_begun`: the C library has written this process's vector for this call already.
        """
        shared = self.shared
        out = np.empty((self.num_processes, *self.shape), self.dtype)
        with locked(self._mutex):
            if self.record.turn == 0:  # at the first call: other processes may be in another collective before it
                self._first = vector
                if not self._announced:  # else Ctrl-C has ended an earlier wait
                    self._announced = True
                    shared.progress.announce(self)
                shared.progress.wait_until(self._agreed)
            shared.progress.check()
            self.record.turn += not has_begun
            where = *self.addresses[1:], self._number
            if not _gather(*where, 0 if has_begun else vector.ctypes.data, out.ctypes.data):
                self.since = time.monotonic()
                shared.late.add(self)
                try:
                    shared.progress.watch()
                    while not _gather(*where, 0, out.ctypes.data):
                        shared.progress.check()
                finally:
                    shared.late.discard(self)
        return out

    def left_to_others(self) -> contextlib.AbstractContextManager[None]:
        """A block in which other threads may gather, in a thread in which the C library has begun to."""
        return unlocked(self._mutex)

    def last(self) -> tuple[int, np.ndarray | None]:
        """How many vectors this process has handed in, those of the C library too, and the last one of them."""
        place = self.shared.host.rank
        number = C.Line.from_address(self.record.lines + place * LINE).arrived if self.record.turn else 0
        if not number:
            return int(self._first is not None), self._first
        row = int(self._rows.reshape(self.depth, -1)[number % self.depth, place])
        return number, np.frombuffer(ctypes.string_at(row, self.record.num_values), self.dtype).reshape(self.shape)

    def agreed(self) -> None:
        """Called by the progress engine when all processes have announced this key."""
        super().agreed()
        self._agreed.set()

    def ranks_missing(self, *_: Any) -> set[int]:
        """Ranks whose vector has not arrived."""
        return super().ranks_missing("arrived", self._number)

    @property
    def _number(self) -> int:
        """Number of the current or last call, from 1."""
        return self.record.turn - 1


_gather = function("gp_gather", 5)
