"""Gathering of vectors through shared memory, by the thread that calls; compiled code can do the same."""

import time

import numpy as np

from ....engine.pthread import address_of, locked, new_mutex
from .layout import ARRIVED, NUM_VALUES, TURN
from .rows import Rows


class SharedGather(Rows):
    """Every process hands in a vector and gets all of them, one call after the other."""

    kind = "gather"

    def __init__(self, shared, names, shape, dtype):
        super().__init__(shared, names, shape, dtype)
        self.since = 0.0
        self.words[NUM_VALUES] *= np.dtype(dtype).itemsize  # bytes
        self._mutex = new_mutex()  # compiled code holds it too
        self.num_processes = shared.progress.size
        self.addresses = tuple(map(address_of, (self._mutex, shared.group, self.words)))  # see compiled_gather

    def gather(self, vector, has_begun=False):
        """Everybody's `vector`, by rank; `has_begun`: compiled code has handed it in at its last turn."""
        shared = self.shared
        out = np.empty((self.num_processes, *self.shape), self.dtype)
        with locked(self._mutex):
            if self.words[TURN] == 0:  # here, not before: others may wait for each other elsewhere before they come
                shared.progress.wait(self._agreement)
            shared.progress.check()
            self.words[TURN] += not has_begun
            where = shared.group.ctypes.data, self.words.ctypes.data, self._number
            if not shared.gather_rows(*where, 0 if has_begun else vector.ctypes.data, out.ctypes.data):
                self.since = time.monotonic()
                shared.late.add(self)
                try:
                    shared.progress.watch()
                    while not shared.gather_rows(*where, 0, out.ctypes.data):
                        shared.progress.check()
                finally:
                    shared.late.discard(self)
        return out

    def ranks_missing(self, *_):
        """From whom something is still to come."""
        return super().ranks_missing(ARRIVED, self._number)

    @property
    def _number(self):
        """Of the call that is under way, or was the last; they are counted from 1."""
        return int(self.words[TURN]) - 1
