"""Progress engine of the MPI store: one thread at a time drives pending exchanges and enforces timeouts."""

import collections
import contextlib
import threading
import time
from typing import Any

import numpy as np

from ...engine.failures import tell
from ...errors import GluonParallelError, WorkerLost
from .. import flight_recorder
from .backoff import Backoff
from .collectives import FAILED, LEFT, Gather
from .lost_workers import LostWorkers
from .messages import Message
from .pending import PendingExchanges

_LAST_WORDS = 2.0  # seconds that one who fails waits, so that the others can say why they end before they are ended
_LOOK, _LOOKS = 0.02, 50  # seconds between two looks at exchanges that others move; how many in vain


class ProgressEngine:
    """All exchanges of this process with the others.

    An exchange is handed in by :meth:`submit`, from any thread, and waits for nobody. The messages are moved by the
    progress thread, or by the thread that waits in :meth:`wait`: it need not be woken, which on a small message costs
    more than the message. A lock lets one of them at a time touch the messages. Exchanges of different keys are
    independent; none waits for its turn behind another, so no order of keys can make processes wait in a ring.

    Args:
        messages: `rank`, `size`, `post`, `flush`, `poll`, `expects_from` and `sending`, as :class:`.Messages`.
        timeout: seconds without any message from a process that is waited for.
    """

    def __init__(self, messages, timeout):
        self.messages = messages
        self.timeout = timeout
        self.rank, self.size = messages.rank, messages.size
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.failure = None
        self.shared: Any = None  # :class:`.SharedMemory`, whose exchanges are watched here and not moved
        self.cuda_allreduce: Any = None  # :class:`.CudaAllreduce`, if large arrays go to MPI where they are
        self.around = contextlib.nullcontext  # what a thread needs that calls MPI: the right GPU, as a rule none
        self._watching = False
        self._submitted: collections.deque = collections.deque()
        self.pending = PendingExchanges(self)
        self.lost = LostWorkers(self)
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._closing = False
        self._thread = None

    def submit(self, exchange):
        """Hand in an exchange; its `finish` is called later, from whichever thread drives the progress engine then."""
        self._submitted.append(exchange)
        # Send it from here if nobody else is at it: waking the thread takes longer than a small message.
        if not self._try(self._turn) or not self._idle():
            self._wake()

    def wait(self, exchange):
        """Hand in an exchange and wait until it has ended.

        Raises:
            WorkerLost, WorkersDiffer: what ended it.
        """
        ended, result = threading.Event(), []
        finish = exchange.finish

        def finished(error):
            finish(error)
            result.append(error)
            ended.set()

        exchange.finish = finished
        self._submitted.append(exchange)
        while not ended.is_set():
            if not self._try(self._drive, ended):
                ended.wait(0.01)  # whoever drives now ends this one as well
            elif self.pending or self._submitted or self.messages.sending:
                self._wake()
        if result[0] is not None:
            self.check()

    def gather(self, name, form, vector):
        """Every process's `vector`, (n,), as the rows of a (size, n) array; waits for all."""
        exchange = Gather(name, form, lambda error: None, vector)
        self.wait(exchange)
        return np.concatenate(exchange.rows).view(vector.dtype).reshape(self.size, *vector.shape)

    def watch(self):
        """See to it that whoever does not come to an exchange through shared memory is found."""
        if not self._watching:
            self._watching = True
            self._wake()

    def check(self):
        """Raise what has ended this progress engine, if anything has."""
        if self.failure is not None:
            tell(self.failure)
            raise self.failure

    def fail(self, error, tell=True):
        """End every exchange with `error`, now and from now on; with `tell` the other processes hear of it."""
        if self.failure is not None:
            return
        self.failure = error
        if tell:
            self._say(FAILED, f"{type(error).__name__}: {error}")
        self.pending.abandon(error)
        while self._submitted:  # one by one: what an end sets free may hand in the next one meanwhile
            self._submitted.popleft().finish(error)
        if self.shared is not None:
            self.shared.abandon(error)
        self.around = contextlib.nullcontext  # what is still said comes from no GPU

    def close(self, reason="", limit=None):
        """Say that this process ends, wait until all others have said so too, and return the ranks that have not.

        Args:
            reason: the error that ends this program early; the others are told.
            limit: seconds to wait for the others.
        """
        limit = self.timeout if limit is None else limit
        deadline = time.monotonic() + (min(limit, _LAST_WORDS) if reason or self.failure else limit)
        self._closing = True  # so that whoever drives lets go of the lock
        with self._lock, self.around():
            self._say(LEFT, reason)
            backoff = Backoff()
            while time.monotonic() < deadline and (self.messages.sending or (self.failure is None and self._absent())):
                backoff.next(self._step())
        self._work.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self.timeout)
        if self.shared is not None:
            self.shared.close()
        return self._absent()

    def _absent(self):
        return [rank for rank in self.others if rank not in self.lost.left]

    # ------------------------------------------------------------------ the thread

    def _wake(self):
        with contextlib.suppress(RuntimeError):  # at the interpreter's end no thread starts; `wait` still works
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gluon_parallel.mpi", daemon=True)
                self._thread.start()
        self._work.set()

    def _try(self, function, *arguments):
        """Call a function that moves messages, unless another thread is at it; returns whether it was called."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            function(*arguments)
        finally:
            self._lock.release()
        return True

    def _run(self):
        quiet = 0
        while not self._closing:
            woken = self._work.wait(_LOOK if self._watching else None)
            if woken:  # what is submitted from here on wakes this thread once more
                self._work.clear()
            with self._lock:
                self._drive(None) if woken else self._turn()
            if self._watching:  # exchanges through shared memory have been under way
                quiet = 0 if woken or self.shared.pending() else quiet + 1
                self._watching = quiet < _LOOKS
                if not self._watching and self.shared.pending():  # it was pushed in this moment
                    self.watch()

    def _drive(self, ended):
        """Move messages until `ended` is set, or until there is nothing to do; the lock is held."""
        # Where somebody waits here a layer stands still; else the devices compute, and need the core.
        backoff = Backoff(growth=1.1 if ended is not None else 1.6)
        while not (ended.is_set() if ended is not None else self._idle()):
            backoff.next(self._turn())

    def _turn(self):
        try:
            with self.around():
                return self._step()
        except Exception as error:  # of MPI itself; whoever waits must not wait for ever
            if not isinstance(error, GluonParallelError):
                error = WorkerLost(f"store 'mpi', process {self.rank}: MPI failed: {type(error).__name__}: {error}")
            self.fail(error)
            return True

    def _idle(self):
        return self._closing or not (
            self.pending or self._submitted or (self.messages.sending and self.failure is None)
        )

    def _step(self):
        moved = bool(self._submitted)
        while self._submitted:
            self.pending.take(self._submitted.popleft())
        self.messages.flush()
        if self.failure is not None:
            return moved
        arrived, more = self.messages.poll(self.pending.memory_for)
        if arrived:
            now = time.monotonic()
            for source, message in arrived:
                self.lost.heard(source, now, message.name)
                self._deliver(source, message)
        if arrived or more:
            self.messages.flush()
            self.pending.end_complete()
            return True
        self.lost.look()
        return moved

    def _deliver(self, source, message):
        if message.kind == FAILED:
            text = bytes(message.payload).decode()
            problem = f"store 'mpi': process {source} of {self.size} failed: {text}"
            self.fail(WorkerLost(f"{problem}. {flight_recorder.write(f'WorkerLost: {problem}')}"), tell=False)
        elif message.kind == LEFT:
            self.lost.left[source] = bytes(message.payload).decode()
        else:
            self.pending.deliver(source, message)

    def _say(self, kind, text):
        for rank in self.others:
            self.messages.post(rank, Message(kind, b"", b"", text.encode()[:4000]))
        self.messages.flush()
