"""Sums through shared memory: one key's exchanges, which the engine hands to compiled code."""

import itertools
import operator
import threading
from typing import Any

import numpy as np

from ....engine import Call, fail
from ..pending import key_of
from . import layout
from .rows import Rows


class KeySums(Rows):
    """Sums at one key."""

    kind = "sum"

    def __init__(self, shared, names, shape, dtype):
        super().__init__(shared, names, shape, dtype)
        self._sums: list = []
        self._number = 0
        self._lock = threading.Lock()
        self.words[layout.DTYPE] = layout.DTYPES.index(dtype)
        shared.progress.submit(self._agreement)

    def push(self, values, outs, priority):
        """The arrays `outs` become the sum of all processes' `values`, when those are ready; returns at once.

        Args:
            values, outs: NDArrays of this process's CPU devices, in the plain layout.
        """
        with self._lock:
            for exchange in self._sums:
                if exchange.fits(values, outs):
                    break
            else:
                exchange = SharedSum(self, len(values), len(outs))
                self._sums.append(exchange)
            exchange.take(values, outs)
            self._push(exchange, priority)

    def push_again(self, values, outs, priority):
        """The same if these are the arrays of an earlier time, which need no second look; whether it was done."""
        self.shared.progress.check()
        with self._lock:
            for exchange in self._sums:
                if exchange.holds(values, outs):
                    self._push(exchange, priority)
                    return True
        return False

    def _push(self, exchange, priority):
        self._number += 1
        try:
            exchange.push(self._number, priority)
        except Exception:  # not Ctrl-C, which may come when the engine has the exchange
            self._number -= 1
            exchange.words[layout.STATE] = layout.IDLE
            raise
        progress = self.shared.progress
        if progress.failure is not None:  # since the caller looked
            exchange.fail(progress.failure)
        progress.watch()


class SharedSum:
    """One exchange at a time of one key, over so many arrays."""

    def __init__(self, key, num_read, num_written):
        self.name, self.form, self.elsewhere = key.name, key.form, key.elsewhere
        self.seen, self.since = 0, 0.0  # which number is waited for, since when
        self._key = key
        self._num_read, self._num_written = num_read, num_written
        self._arrays: list = []
        self._call: Any = None
        words = self.words = np.zeros(layout.HANDLES + 2 * (num_read + num_written), np.int64)
        words[layout.GROUP], words[layout.KEY] = key.shared.group.ctypes.data, key.words.ctypes.data
        words[layout.NUM_READ], words[layout.NUM_WRITTEN] = num_read, num_written
        key.shared.enter(self)

    def fits(self, values, outs):
        """Whether nothing is under way, and the arrays are as many."""
        idle = self.words[layout.STATE] == layout.IDLE
        return idle and len(values) == self._num_read and len(outs) == self._num_written

    def holds(self, values, outs):
        """Whether nothing is under way, and these are the arrays of the last time."""
        return self.fits(values, outs) and all(map(operator.is_, itertools.chain(values, outs), self._arrays))

    def take(self, values, outs):
        """Use these arrays from now on."""
        self._arrays = [*values, *outs]
        for number, array in enumerate(self._arrays):
            self.words[layout.HANDLES + number] = array.handle.value
        begin, title = self._key.shared.driver.begin.address, f"gluon_parallel.mpi key {key_of(self.name)}"
        self._call = Call(begin, self.words.ctypes.data, values, outs, title)

    def push(self, number, priority):
        """Hand the exchange of this number to the engine."""
        self.words[layout.NUMBER] = number
        self.words[layout.STATE] = layout.PUSHED
        self._call.push(priority)

    def fail(self, error):
        """Each array that was to be written raises `error`: the engine forgets as soon as one of them is read."""
        fail(self._arrays[self._num_read + 1 :], error)

    def ranks_missing(self):
        """From whom something is still to come."""
        number = self.seen
        if self.words[layout.STATE] == layout.HOLDING:
            return self._key.ranks_missing(layout.LEFT, number - self._key.depth)
        return self._key.ranks_missing(layout.ARRIVED, number)
