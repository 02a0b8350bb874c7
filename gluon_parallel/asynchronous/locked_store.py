"""Lock with timeout around a store: worker threads use it one at a time, and the first failure ends all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Optional

from ..errors import WorkerTimeout
from .rules import Array
from .store import Grant, Pushed, Store


class Stopped(Exception):
    """Another worker failed, or the caller stopped the pass: end without an error."""


class LockedStore:
    """A store that several threads may use.

    Args:
        store: used through this object alone.
        timeout: seconds that a worker waits for its turn before it raises.
    """

    def __init__(self, store: Store, timeout: float = 600.0) -> None:
        self.store, self.timeout = store, timeout
        self.failure: Optional[BaseException] = None
        self.pushes = 0
        self._stopped = False
        self._turn = threading.Condition()
        self.lock = threading.Lock()  # of the caller's `observe`, so that its calls come one at a time

    def begin(self, batches: Iterable[Any]) -> None:
        """Begin a pass, before its threads start."""
        with self._turn:
            self.failure, self._stopped = None, False
            self.store.begin(batches)

    def next(self, worker: int) -> Optional[Grant]:
        """Wait until the worker may start; returns None when the pass is over for it.

        Raises:
            Stopped: end quietly.
            WorkerTimeout: nobody let it start within the limit; says whom it waited for.
        """
        limit = time.monotonic() + self.timeout
        with self._turn:
            while True:
                self._check()
                grant = self.store.take(worker)
                if grant is not None:
                    return grant
                if self.store.is_gone(worker):
                    return None
                left = limit - time.monotonic()
                if left <= 0:
                    others = ", ".join(f"worker {other}" for other in self.store.waiting_for())
                    raise WorkerTimeout(
                        f"worker {worker} waited {self.timeout:g} s for its next step; {others or 'nobody'} had a "
                        "batch and pushed nothing. Look for what holds it up, take a mode that does not wait for the "
                        "slowest (async, dc, backup), or a longer timeout"
                    )
                self._turn.wait(min(left, 1.0))

    def push(self, worker: int, gradient: Array, num_samples: float = 1) -> Pushed:
        """Hand in a gradient."""
        with self._turn:
            self._check()
            pushed = self.store.push(worker, gradient, num_samples)
            self.pushes += 1
            self._turn.notify_all()
            return pushed

    def fail(self, error: BaseException) -> None:
        """A worker cannot go on: keep the first error, and stop the others."""
        with self._turn:
            if self.failure is None:
                self.failure = error
            self._stopped = True
            self._turn.notify_all()

    def stop(self) -> None:
        """Stop the pass."""
        with self._turn:
            self._stopped = True
            self._turn.notify_all()

    def _check(self) -> None:
        if self._stopped:
            raise Stopped
