"""Gathering of vectors through shared memory, by the thread that calls; compiled code can do the same."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ....engine.compiled.pthread import locked, new_mutex
from ....engine.compiled.records import address_of
from .rows import Rows

if TYPE_CHECKING:
    from .memory import SharedMemory


class SharedGather(Rows):
    """Every process hands in a vector and gets all of them, one call after the other."""

    kind = "gather"

    def __init__(self, shared: SharedMemory, name: bytes, form: bytes, shape: tuple[int, ...], dtype: str) -> None:
        super().__init__(shared, name, form, shape, dtype)
        self.record.num_values *= np.dtype(dtype).itemsize  # bytes
        self._mutex = new_mutex()  # compiled code holds it too
        self.num_processes = len(shared.members)
        self._announced, self._agreed = False, threading.Event()
        self.addresses = tuple(map(address_of, (self._mutex, shared.group, self.record)))  # see compiled_gather

    def gather(self, vector: np.ndarray, has_begun: bool = False) -> np.ndarray:
        """The `vector` of each process of this host, by rank.

        `has_begun`: compiled code has handed it in at its last turn.
        """
        shared = self.shared
        out = np.empty((self.num_processes, *self.shape), self.dtype)
        with locked(self._mutex):
            if self.record.turn == 0:  # here, not before: others may wait for each other elsewhere before they come
                if not self._announced:  # else Ctrl-C has ended the wait before
                    self._announced = True
                    shared.progress.announce(self)
                shared.progress.wait_until(self._agreed)
            shared.progress.check()
            self.record.turn += not has_begun
            where = *self.addresses[1:], self._number
            if not shared.gather(*where, 0 if has_begun else vector.ctypes.data, out.ctypes.data):
                self.since = time.monotonic()
                shared.late.add(self)
                try:
                    shared.progress.watch()
                    while not shared.gather(*where, 0, out.ctypes.data):
                        shared.progress.check()
                finally:
                    shared.late.discard(self)
        return out

    def agreed(self) -> None:
        """All processes have come to this key."""
        super().agreed()
        self._agreed.set()

    def ranks_missing(self, *_: Any) -> set[int]:
        """From whom something is still to come."""
        return super().ranks_missing("arrived", self._number)

    @property
    def _number(self) -> int:
        """Of the call that is under way, or was the last; they are counted from 1."""
        return self.record.turn - 1
