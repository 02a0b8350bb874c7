"""Backoff of a thread that polls: it first yields its core, then sleeps for longer and longer."""

import ctypes
import threading
import time

_libc = ctypes.CDLL(None)  # called this way it lets go of the interpreter's lock as well
_precise = threading.local()
_TIMER_SLACK = 29  # prctl's number for it
_SHORTEST, _LONGEST = 10e-6, 500e-6  # seconds of sleep
_PATIENCE = 10  # polls that find nothing before the first sleep


class Backoff:
    """Waits between polls. On few cores the process that is waited for needs the core."""

    def __init__(self, growth: float = 1.1) -> None:
        self._growth = growth
        if not getattr(_precise, "is_set", False):
            _libc.prctl(_TIMER_SLACK, 1000, 0, 0, 0)  # this thread's sleep ends within a microsecond, not 50
            _precise.is_set = True
        self._turns, self._length = 0, _SHORTEST

    def next(self, moved: bool) -> None:
        """Wait, unless the last poll has `moved` something."""
        if moved:
            self._turns, self._length = 0, _SHORTEST
            return
        self._turns += 1
        if self._turns < _PATIENCE:
            _libc.sched_yield()
        else:
            time.sleep(self._length)
            self._length = min(self._length * self._growth, _LONGEST)
