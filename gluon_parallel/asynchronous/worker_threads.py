"""Worker threads that use one store one at a time; the first failure ends all of them."""

import threading
import time
from collections.abc import Iterable
from typing import Any, Callable, Optional

from ..device_threads.thread import State
from ..errors import WorkerTimeout
from .rules import Array
from .store import Grant, Store

_GRACE = 30.0  # seconds that a thread has to finish the step that it is in when all shall end


class Stopped(Exception):
    """Another worker failed, or the pass was interrupted: end without an error."""


class WorkerThreads:
    """One thread per worker of a store, each in the NumPy mode and scopes of the thread that calls :meth:`run`.

    The store is used through this object alone; `timeout` seconds without any push are an error.

    Example:
        >>> import numpy as np
        >>> from gluon_parallel.asynchronous import create_store, rules
        >>> threads = WorkerThreads(create_store("async", np.zeros(1), 2, rules.sgd, lr=2.0))
        >>> def work(worker):
        ...     while threads.next(worker) is not None:
        ...         threads.push(worker, np.array([-1.0]))
        >>> threads.run(work, range(6))
        >>> threads.store.weights
        array([6.])
    """

    def __init__(self, store: Store, timeout: float = 600.0) -> None:
        self.store, self.timeout = store, timeout
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)  # notified after each push
        self._ended = threading.Condition()  # a thread has; Ctrl-C may break a wait, so not with the workers' lock
        self._running: set[threading.Thread] = set()
        self._failure: Optional[BaseException] = None
        self._stopped = False
        self._pushes = 0

    def run(self, work: Callable[[int], None], batches: Iterable[Any]) -> None:
        """Begin a pass over the batches, and call ``work(worker)`` once in every thread until all have returned.

        Raises the first exception of `work`; WorkerTimeout: nothing was pushed in time, or a thread does not end.
        """
        self.store.begin(batches)
        self._failure, self._stopped, state = None, False, State()
        workers = range(self.store.num_workers)
        threads = [
            threading.Thread(target=self._run, args=(work, worker, state), name=f"worker {worker}", daemon=True)
            for worker in workers
        ]
        try:
            for thread in threads:
                self._running.add(thread)  # before it is: Ctrl-C may come within start()
                thread.start()
            self._watch()
        finally:
            self._join(threads)
        if self._failure is not None:
            raise self._failure

    def _run(self, work: Callable[[int], None], worker: int, state: State) -> None:
        failure: Optional[BaseException] = None
        try:
            state.apply()
            work(worker)
        except Stopped:
            pass
        except BaseException as error:  # it is raised where run() was called
            failure = error
        with self._lock:
            if self._failure is None:
                self._failure = failure
            self._running.discard(threading.current_thread())
        with self._ended:
            self._ended.notify()

    def _watch(self) -> None:
        """Wait until all threads have ended or one has failed."""
        pushes, limit = -1, 0.0
        with self._ended:
            while self._running and self._failure is None:
                if self._pushes != pushes:
                    pushes, limit = self._pushes, time.monotonic() + self.timeout
                elif time.monotonic() > limit:
                    late = ", ".join(f"worker {worker}" for worker in self.store.waiting_for()) or "nobody"
                    raise WorkerTimeout(
                        f"nothing was pushed for {self.timeout:g} s; {late} had a batch. Look for what holds it up, "
                        "take a mode that does not wait for the slowest (async, dc, backup), or a longer timeout"
                    )
                self._ended.wait(0.1)

    def _join(self, threads: list[threading.Thread]) -> None:
        """Tell all threads to end, and wait for them.

        ``Thread.join`` is asked only when a thread is about to end: before Python 3.13, Ctrl-C within it marks a thread
        as stopped that still runs, and from then on nobody can wait for it.
        """
        with self._lock:
            self._stopped = True
            self._turn.notify_all()
        with self._ended:
            self._ended.wait_for(lambda: not self._running, 1.0)
            self._running -= {thread for thread in threads if thread.ident is None}  # Ctrl-C came before its start
            if not self._ended.wait_for(lambda: not self._running, _GRACE):
                late = ", ".join(thread.name for thread in threads if thread in self._running)
                raise WorkerTimeout(f"{late} did not end within {_GRACE:g} s after they were told to stop")
        for thread in threads:
            if thread.ident is not None:
                thread.join()

    def next(self, worker: int) -> Optional[Grant]:
        """Wait until the worker may start; returns None when the pass is over for it, and raises Stopped if for all."""
        with self._lock:
            while not self._stopped:
                grant = self.store.take(worker)
                if grant is not None or self.store.is_gone(worker):
                    return grant
                self._turn.wait()
        raise Stopped

    def push(self, worker: int, gradient: Array, num_samples: float = 1) -> None:
        """Hand in a gradient; raises Stopped as :meth:`next`."""
        with self._lock:
            if self._stopped:
                raise Stopped
            self.store.push(worker, gradient, num_samples)
            self._pushes += 1
            self._turn.notify_all()
