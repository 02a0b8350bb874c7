"""Worker threads that start together, are joined in a way that hears Ctrl-C, and always end."""

from __future__ import annotations

import threading
import time
from typing import Callable

from ..device_threads.state import State
from ..errors import WorkerTimeout


class WorkerThreads:
    """One thread per worker, each of which calls ``work(worker)`` once, in the NumPy mode and scopes of the caller.

    ``Thread.join`` is asked only when a thread is about to end: before Python 3.13, Ctrl-C within it marks a thread as
    stopped that still runs, and from then on nobody can wait for it.

    Args:
        work: must not raise.
        num_workers: numbered from 0.

    Example:
        >>> done = []
        >>> threads = WorkerThreads(done.append, 3)
        >>> threads.start()
        >>> threads.wait(10.0), sorted(done)
        (True, [0, 1, 2])
    """

    def __init__(self, work: Callable[[int], None], num_workers: int) -> None:
        self._work, self._state = work, State()
        self._threads = [
            threading.Thread(target=self._run, args=(worker,), name=f"worker {worker}", daemon=True)
            for worker in range(num_workers)
        ]
        self._begun = [threading.Event() for _ in self._threads]
        self._ended = [threading.Event() for _ in self._threads]
        self._num_started = 0  # counted before they are: Ctrl-C may come within start()

    def _run(self, worker: int) -> None:
        self._begun[worker].set()
        try:
            self._state.apply()
            self._work(worker)
        finally:
            self._ended[worker].set()

    def start(self) -> None:
        """Start all threads."""
        for thread in self._threads:
            self._num_started += 1
            thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether all have ended within this time."""
        limit = time.monotonic() + seconds
        if not all(ended.wait(max(0.0, limit - time.monotonic())) for ended in self._ended):
            return False
        for thread in self._threads:
            thread.join()
        return True

    def join(self, seconds: float) -> None:
        """Wait for all that were started, after they were told to end.

        Raises:
            WorkerTimeout: names those that still work after this time.
        """
        limit, late = time.monotonic() + seconds, []
        for worker in range(self._num_started):
            if not self._begun[worker].wait(1.0):
                continue  # Ctrl-C came before Python could start it
            if self._ended[worker].wait(max(0.0, limit - time.monotonic())):
                self._threads[worker].join()
            else:
                late.append(self._threads[worker].name)
        if late:
            raise WorkerTimeout(f"{', '.join(late)} did not end within {seconds:g} s after they were told to stop")
