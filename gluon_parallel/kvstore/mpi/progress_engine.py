"""Progress engine of the MPI store: one thread at a time drives what is under way and enforces timeouts."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...errors import GluonParallelError
from ...mxnet.engine.failures import mark_reported
from .agreement import ProcessGroup
from .lost_workers import LostWorkers
from .operations import Operation, bytes_of, has_persistent
from .transport import FAILED, LEFT, MPI_LOCK, Backoff, Message, Messages

OF_ALL, OF_LEADERS = (5, 6), (7, 8)  # messages up and down: of all processes, and of one process of each host

_LAST_WORDS = 2.0  # seconds that one who fails waits, so that the others can say why they end before they are ended
_LOOK, _LOOKS = 0.02, 50  # seconds between two looks at exchanges that others move; how many in vain
_STEPS = 8  # how often MPI's operations are tested for one look at messages, where messages are rare
_IDLE = 0.1  # seconds between two looks at messages where nothing is under way


class ProgressEngine:
    """All exchanges of this process with the others.

    Any thread hands in operations by :meth:`submit`. MPI is driven by the progress thread, or by the thread that waits
    in :meth:`wait`: to wake another one costs more than the exchange of a small vector. Operations of different keys do
    not wait for each other, so no order of keys can make processes wait in a ring.

    Args:
        comm: a communicator of its own, of mpi4py.
        timeout: seconds without any sign of a process that is waited for.
        whole: the progress engine of all processes, if this is that of a part of them.
        ranks: the number of each of its processes among all; by default they are all.
    """

    def __init__(
        self, comm: Any, timeout: float, whole: ProgressEngine | None = None, ranks: Sequence[int] | None = None
    ) -> None:
        from mpi4py import MPI  # here: whoever has no MPI uses the other stores

        self.mpi: Any = MPI
        self.comm, self.timeout, self.whole = comm, timeout, whole
        with MPI_LOCK:
            self.rank, self.size = comm.rank, comm.size
            self.persistent: bool = has_persistent() if whole is None else whole.persistent
        # What has ended this progress engine, or that of all processes, or of a part: it ends all of them.
        self.failures: list[Exception] = [] if whole is None else whole.failures
        self.progress_engines: list = (
            [] if whole is None else whole.progress_engines
        )  # that of all processes, and those of parts
        self.progress_engines.append(self)
        self.ranks = range(self.size) if ranks is None else tuple(ranks)
        size = self.size if whole is None else len(whole.ranks)
        self.name = f"process {self.ranks[self.rank]} of {size}"  # this process, for errors
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.messages = Messages(comm, self.mpi)
        self.failure: Exception | None = None
        self._has_ended = threading.Event()  # whether everything that was under way has ended with it
        self.shared: Any = None  # :class:`.SharedMemory`, whose exchanges are watched here and not moved
        self.everyone = ProcessGroup(self, comm, list(range(self.size)), OF_ALL)
        self.groups = dict.fromkeys(OF_ALL, self.everyone)
        self.counts: dict = {}  # name -> {signature: how often this process has come there, or its `HostKey`}
        self.last = b"", 0  # the name of the exchange to which it came last, and when
        self.waiting: dict = {}  # operations under way
        self.started: list = []  # (MPI's request, its operation)
        self._done: collections.deque = collections.deque()  # operations that MPI has done
        self._gathers: dict = {}
        self._num_steps = 0
        self._last_words_until = 0.0
        self.is_watching = False
        self._submitted: collections.deque = collections.deque()
        self.lost = LostWorkers(self)
        self._lock = threading.Lock()  # of the thread that drives
        self._work = threading.Event()
        self._closing = False
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], Any]) -> None:
        """Have `function` called that calls MPI, soon."""
        self._submitted.append(function)
        thread = self._thread
        # `_closing` last: `retire` sets it first.
        if (
            self._work.is_set()
            and self.failure is None
            and thread is not None
            and thread.is_alive()
            and not self._closing
        ):
            return  # the thread has been woken, and finds this too
        # Do it here if nobody else is at it: waking the thread takes longer than a small exchange. Where others are
        # under way the thread is awake, and tests them.
        if not self._try(self._drive_once, self._start_submitted if self.started else None) or not self._idle():
            self._wake()

    def announce(self, exchange: Any, record: Any = None) -> None:
        """Tell the other processes of an exchange whose memory all allocate in one order.

        The C library counts in `record` how often this process comes to it, if there is one.
        """
        exchange.since = time.monotonic()
        self.counts.setdefault(exchange.name, {})[exchange.signature] = record or 1
        self.submit(functools.partial(self._announce, exchange))

    def _announce(self, exchange: Any) -> None:
        if self.failure is None:
            if self.shared is not None:
                self.shared.announce_ended()  # first, so that all processes can use that memory for this exchange soon
            self.everyone.announce(exchange)

    def wait(self, operation: Operation, before: Callable[[], None] = lambda: None) -> None:
        """Call an operation and wait until it has ended.

        Raises:
            WorkerLost, WorkersDiffer: what ended it.
        """
        ended, result = threading.Event(), []

        def finished(error: Exception | None) -> None:
            result.append(error)
            ended.set()

        self._submitted.append(lambda: operation._take(before, finished))
        self.wait_until(ended)
        if not result or result[0] is not None:
            self.check()

    def wait_until(self, ended: threading.Event) -> None:
        """Drive until the event `ended` is set, or everything has failed."""
        # No `wait_until`: the limit of :class:`.LostWorkers` starts anew while those that are waited for are heard of.
        while not ended.is_set() and self.failure is None:
            if not self._try(self._drive, ended):
                ended.wait(0.01)  # whoever drives now ends this one as well
            elif not self._idle():
                self._wake()

    def gather(
        self, name: bytes, signature: bytes, vector: np.ndarray, group: ProcessGroup | None = None
    ) -> np.ndarray:
        """The `vector`, (n,), of each process of `group`, by default of all, as rows of one array; waits for all."""
        group = self.everyone if group is None else group
        known = self._gathers.get((name, signature))
        if known is None:
            rows = np.empty((len(group.ranks), *vector.shape), vector.dtype)
            arguments = self.mpi.IN_PLACE, [bytes_of(rows), vector.nbytes, self.mpi.BYTE]
            operation = Operation(group, name, signature, [("Allgather", arguments, None)], vector.nbytes)
            known = self._gathers[name, signature] = rows, operation, threading.Lock()
        rows, operation, lock = known
        with lock:
            self.wait(operation, functools.partial(rows.__setitem__, group.rank, vector))
            return rows.copy()

    def broadcast(self, name: bytes, signature: bytes, data: np.ndarray, rank: int) -> None:
        """Send the bytes `data`, (n,), of process `rank` to all, whose `data` they become; waits."""
        arguments = [data, data.nbytes, self.mpi.BYTE], rank
        self.wait(Operation(self.everyone, name, signature, [("Bcast", arguments, None)], data.nbytes, once=True))

    def watch(self) -> None:
        """See to it that whoever does not come to an exchange through shared memory is found."""
        if not self.is_watching:
            self.is_watching = True  # the thread sees that soon enough, without being woken
            if self._thread is None:
                self._wake()

    def check(self) -> None:
        """Raise what has ended this progress engine, if anything has."""
        failure = self.failure or next(iter(self.failures), None)
        if failure is not None:
            self._wake()  # the thread that drives MPI ends what is under way here
            mark_reported(failure)
            raise failure

    def fail(self, error: Exception, tell: bool = True) -> None:
        """End every exchange with `error`, now and from now on; with `tell` the other processes hear of it."""
        if self.failure is not None:
            return
        self.failure, self._last_words_until = error, time.monotonic() + _LAST_WORDS
        self.failures.append(error)
        if tell:
            self._say(FAILED, f"{type(error).__name__}: {error}"[:4000])
        for operation in list(self.waiting):
            operation.abandon(error)
        while self._submitted:  # one by one: what an end sets free may hand in the next one meanwhile
            self._submitted.popleft()()
        if self.shared is not None:
            self.shared.abandon(error)
        self._has_ended.set()
        if self.whole is not None:
            self.whole._wake()

    def wait_for_end(self) -> None:
        """After a failure of one of :attr:`progress_engines`, wait until all that was under way here has ended."""
        self._wake()  # this engine may not have heard of it yet
        self._has_ended.wait(self.timeout)

    def disown(self, error: Exception) -> None:
        """In a fork of the process that has made it, which has none of its threads: raise `error` from now on."""
        self.failure = error
        self.failures.append(error)
        if self.shared is not None:
            self.shared.disown(error)

    def close(self, reason: str = "", limit: float | None = None) -> list[int]:
        """Say that this process ends, wait until all others have said so too, and return the ranks that have not.

        Args:
            reason: the error that ends this program early; the others are told.
            limit: seconds to wait for the others.
        """
        limit = self.timeout if limit is None else limit
        deadline = time.monotonic() + (min(limit, _LAST_WORDS) if reason or self.failure else limit)
        self._closing = True  # so that whoever drives lets go of the lock
        if not self._lock.acquire(timeout=self.timeout):
            return self._absent()  # MPI does not return to a thread that has called it, so nothing can be said
        try:
            self._take_leave(reason, deadline)
        finally:
            self._lock.release()
        self.retire()
        return self._absent()

    def retire(self) -> None:
        """End this engine's threads, without a word to the other processes; nothing is under way."""
        self._closing = True
        self._work.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self.timeout)
        if self.shared is not None:
            self.shared.close()
        self._has_ended.set()

    def _take_leave(self, reason: str, deadline: float) -> None:
        """Say that this process ends, and wait for the others to say so; the lock is held."""
        if not MPI_LOCK.acquire(timeout=self.timeout):
            return  # as above
        try:
            self._say(LEFT, (reason, self.lost.account([*self.counts])))
        finally:
            MPI_LOCK.release()
        backoff, is_last = Backoff(), self.failure is not None
        while time.monotonic() < deadline and (self.messages.sending or (self.failure is None and self._absent())):
            if not is_last and (self.failure is not None or not self._absent()):  # who has gone receives nothing more
                is_last, deadline = True, min(deadline, time.monotonic() + _LAST_WORDS)
            with MPI_LOCK:
                moved = self._step()
            backoff.next(moved)

    def _absent(self) -> list[int]:
        return [rank for rank in self.others if rank not in self.lost.left]

    # ------------------------------------------------------------------ operations under way

    def begun(self, operation: Operation) -> None:
        """A call of that operation begins."""
        counts = self.counts.setdefault(operation.name, {})
        counts[operation.signature] = counts.get(operation.signature, 0) + 1
        self.last = operation.name, time.monotonic_ns()
        self.waiting[operation] = None

    def active(self) -> list[Any]:
        """What waits for other processes."""
        waiting = [*list(self.waiting), *self.everyone.active()]
        return waiting if self.shared is None else waiting + self.shared.waiting()

    # ------------------------------------------------------------------ the thread

    def _wake(self) -> None:
        if self._thread is None and self._starting.acquire(blocking=False):  # else another thread starts it
            try:
                with contextlib.suppress(RuntimeError):  # at the interpreter's end no thread starts; `wait` still works
                    if self._thread is None:
                        thread = threading.Thread(target=self._run, name="gluon_parallel.mpi", daemon=True)
                        thread.start()
                        self._thread = thread
            finally:
                self._starting.release()
        if not self._work.is_set():
            self._work.set()

    def _try(self, function: Callable[..., Any], *arguments: Any) -> bool:
        """Call a function that drives MPI, unless another thread is at it; returns whether it was called."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            function(*arguments)
        finally:
            self._lock.release()
        return True

    def _run(self) -> None:
        quiet = 0
        while not self._closing:
            woken = self._work.wait(_LOOK if self.is_watching else _IDLE)
            if woken:  # what is submitted from here on wakes this thread once more
                self._work.clear()
            with self._lock:
                self._drive_once()
                self._drive(None)
            if self.is_watching:  # exchanges through shared memory have been under way
                quiet = 0 if woken or self.shared.pending() else quiet + 1
                self.is_watching = quiet < _LOOKS
                if not self.is_watching and self.shared.pending():  # it was pushed in this moment
                    self.watch()

    def _drive(self, ended: threading.Event | None) -> None:
        """Drive until `ended` is set, or until there is nothing to do; the lock is held."""
        # Where somebody waits here a layer stands still; else the devices compute, and need the core.
        backoff = Backoff(growth=1.2 if ended is not None else 1.6)
        while not (self._idle() if ended is None else ended.is_set() or self.failure is not None):
            backoff.next(self._drive_once())

    def _drive_once(self, step: Callable[[], bool] | None = None) -> bool:
        with MPI_LOCK:
            try:
                return (step or self._step)()
            except Exception as error:  # of MPI itself; whoever waits must not wait for ever
                if self.failure is None:  # else it says nothing new, and to report it takes time
                    self.fail(error if isinstance(error, GluonParallelError) else self.lost.from_mpi_error(error))
                return True

    def _idle(self) -> bool:
        if self.failure is None:
            busy = self.waiting or self.everyone.pending() or self.messages.sending
        else:  # what tells the others of it is sent while MPI is driven
            busy = self.messages.sending and time.monotonic() < self._last_words_until
        return self._closing or not (self._submitted or busy)

    def _start_submitted(self) -> bool:
        """Call what was submitted, and send what it has posted; returns whether there was anything. MPI is locked."""
        if self.failures:
            self.fail(self.failures[0])
        moved = bool(self._submitted)
        while self._submitted:
            self._submitted.popleft()()
        self.messages.flush()
        return moved

    def _step(self) -> bool:
        moved = self._start_submitted()
        if self.failure is not None:
            self.messages.test_sending(has_failed=True)
            return moved
        is_testing = bool(self.started)
        moved |= self._test()
        if self.shared is not None:
            self.shared.tell_summed()
            self.shared.announce_ended()
        self._num_steps += 1
        if not is_testing or self._num_steps % _STEPS == 0 or any(group.pending() for group in self.groups.values()):
            for source, message in self.messages.poll():
                self._deliver(source, message)
                moved = True
        if moved:
            self.messages.flush()
            return True
        self.lost.look()
        return False

    def _test(self) -> bool:
        """Whether operations have been completed."""
        if not (self.started or self._done) or self.failure is not None:
            return False
        done = set(self.mpi.Request.Testsome([request for request, _ in self.started]) or () if self.started else ())
        if done:
            ended = dict.fromkeys(self.started[number][1] for number in sorted(done))
            self.started = [entry for number, entry in enumerate(self.started) if number not in done]
            under_way = {operation for _, operation in self.started}
            self._done.extend(operation for operation in ended if operation not in under_way)
        while self._done and self.failure is None:  # what Ctrl-C leaves here is completed in the next step
            self._done.popleft().complete()
        return bool(done)

    def _deliver(self, source: int, message: Message) -> None:
        if message.kind in self.groups:
            self.lost.heard(source)
            self.groups[message.kind].deliver(source, message)
        else:
            self.lost.deliver(source, message)

    def _say(self, kind: int, payload: Any) -> None:
        for rank in self.others:
            self.messages.post(rank, Message(kind, b"", b"", payload))
        self.messages.flush()
