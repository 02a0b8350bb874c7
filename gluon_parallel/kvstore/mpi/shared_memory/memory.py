"""Shared memory of the processes of one host: allocation, and the exchanges that are under way."""

import threading
import time

import numpy as np

from ....engine.failures import address
from ....errors import ArrayMismatch, StoreUnavailable
from ...flight_recorder import RECORDER
from ...flight_recorder.layout import NUM_WORDS
from ..pending import key_of
from . import layout
from .gathers import SharedGather
from .rows import TWICE
from .sums import KeySums

_NAP = 0.02  # seconds in which vectors are gathered, as a rule; else the gathering is watched


class SharedMemory:
    """Sums through `memory`, a map of the same file in every process of `progress`.

    Args:
        progress: what the processes need to agree about a key goes through it, and whoever is lost is found by it.
    """

    def __init__(self, progress, memory):
        from . import compiled_driver, compiled_gather  # here: half a second for Numba, for those who share alone

        self.driver, self.gather_rows = compiled_driver, compiled_gather.gather
        self.progress = progress
        self._memory = memory  # holds the map
        self.words = np.frombuffer(memory, np.int64)
        self.address = self.words.ctypes.data
        records = progress.size * layout.LINE  # where the flight recorders begin
        self._used = records + progress.size * NUM_WORDS * 8
        RECORDER.move_to(self.words[records // 8 : self._used // 8].reshape(progress.size, NUM_WORDS))
        self._lock = threading.RLock()
        self._rows: dict = {}  # names of a key -> its rows
        self._sums: list = []
        self.late: set = set()  # gatherings that take longer
        self._beats = np.zeros(progress.size, np.int64)
        group = self.group = np.zeros(layout.NUM_GROUP_WORDS, np.int64)
        self._table = np.zeros(1 << 10, np.int64)
        group[layout.SIZE], group[layout.RANK] = progress.size, progress.rank
        group[layout.LINES], group[layout.EXCHANGES] = self.address, self._table.ctypes.data
        group[layout.RECORDER] = RECORDER.where.ctypes.data
        group[layout.SECONDS], group[layout.NANOSECONDS] = 0, int(_NAP * 1e9)
        self._thread = threading.Thread(
            target=compiled_driver.drive, args=(group.ctypes.data,), name="gluon_parallel.shared", daemon=True
        )
        self._thread.start()

    def sums(self, names, array):
        """What sums arrays like this at a key; None if its sums have to go by messages.

        Args:
            names: of the key in the progress engine: for what is agreed about it, and for its messages of any kind.
            array: one of its NDArrays.
        """
        if np.dtype(array.dtype).name not in layout.DTYPES or array.size == 0:
            return None
        return self._rows_of(KeySums, names, array)

    def gathers(self, names, vector):
        """The same for gathering vectors like this one; None if they are too long."""
        return self._rows_of(SharedGather, names, vector) if 0 < vector.nbytes <= TWICE else None

    def _rows_of(self, kind, names, array):
        dtype = np.dtype(array.dtype).name
        with self._lock:
            if names not in self._rows:
                self._rows[names] = kind(self, names, array.shape, dtype)
            known = self._rows[names]
        return known if (known.shape, known.dtype) == (array.shape, dtype) else None

    def allocate(self, size):
        """The offset of so many bytes; process 0 alone does so."""
        with self._lock:
            begin = self._used
            self._used += size + -size % layout.LINE
        if self._used > len(self._memory):
            raise StoreUnavailable(f"store 'mpi': {self._used} bytes of shared memory are more than this host has")
        return begin

    def enter(self, exchange):
        """Make a new exchange known to the driver."""
        with self._lock:
            number = len(self._sums)
            if number == len(self._table):
                table = np.concatenate([self._table, np.zeros_like(self._table)])
                self._kept = [self._table, *getattr(self, "_kept", ())]  # the driver may be reading it
                self._table = table
                self.group[layout.EXCHANGES] = table.ctypes.data
            self._sums.append(exchange)
            self._table[number] = exchange.words.ctypes.data
            self.group[layout.NUM_EXCHANGES] = number + 1

    def look(self):
        """Move everything that can be moved."""
        self.driver.look(self.group.ctypes.data)

    def pending(self):
        """Whether anything is under way."""
        return bool(self.late) or any(exchange.words[layout.STATE] for exchange in self._sums)

    def heard(self):
        """The ranks from which something has come since the last call."""
        beats = self.words[layout.BEAT : self.progress.size * layout.LINE // 8 : layout.LINE // 8].copy()
        ranks = np.flatnonzero(beats != self._beats).tolist()
        self._beats = beats
        return ranks

    def waiting(self):
        """The exchanges that wait for other processes.

        Raises:
            ArrayMismatch: one cannot be done.
        """
        found, now = list(self.late), time.monotonic()
        for exchange in self._sums:
            state, number = exchange.words[layout.STATE], exchange.words[layout.NUMBER]
            if state in (layout.HOLDING, layout.WAITING):
                if exchange.words[layout.PROBLEM]:
                    raise ArrayMismatch(
                        f"store 'mpi', key {key_of(exchange.name)}: an operator has left the array in oneDNN's "
                        "own layout since the last exchange. Let it write to an array of its own, not to out=, or hand "
                        "over a copy"
                    )
                if exchange.seen != number:
                    exchange.seen, exchange.since = number, now
                found.append(exchange)
        return found

    def abandon(self, error):
        """End everything that is under way, now and from now on: who reads its arrays gets `error`."""
        pending = [exchange for exchange in self._sums if exchange.words[layout.STATE]]
        for exchange in pending:
            exchange.fail(error)  # before it ends, so that nobody reads its arrays in between
        self.group[layout.FAILED] = address(error)
        self.look()

    def close(self):
        """End the driver."""
        self.group[layout.STOPPED] = 1
        self.driver.wake(self.group.ctypes.data, self.progress.rank)
        self._thread.join()
