"""One process's exchanges are driven by one thread at a time, meet by key in any order, and end within a limit."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import threading
import time
from typing import Any

import numpy as np

from ..errors import GluonParallelError, WorkerLost, WorkersDiffer
from ..failures import tell
from .exchanges import FAILED, LEFT, PART, VALUE
from .wire import Letter

_libc = ctypes.CDLL(None)  # called this way it lets go of the interpreter's lock as well
_precise = threading.local()
_TIMER_SLACK = 29  # prctl's number for it
_SHORTEST_NAP, _LONGEST_NAP = 10e-6, 500e-6
_PATIENCE = 10  # polls that find nothing before the first nap
_LAST_WORDS = 2.0  # seconds that one who fails waits, so that the others can say why they end before they are ended
_LOOK, _LOOKS = 0.02, 50  # seconds between two looks at exchanges that others move; how many in vain
_MOST_LIMITS = 10  # an exchange whose partners are alive but silent about it ends after so many limits


class Hub:
    """All exchanges of this process with the others.

    An exchange is handed in by :meth:`submit`, from any thread, and waits for nobody. The messages are moved by a
    thread of the hub, or by the one that waits in :meth:`wait`: it need not be woken, which on a small message costs
    more than the message. A lock lets one of them at a time touch the wire. Every exchange stands for itself, by its
    key; none waits for its turn behind another, so no order of keys can make processes wait for each other in a ring.

    Args:
        wire: `rank`, `size`, `post`, `flush`, `poll`, `expects_from` and `sending`, as :class:`.wire.Wire`; where
            memory is swapped also `offer` and `fill`.
        timeout: seconds without any message from a process that is waited for.
        name: how errors call the store.
    """

    def __init__(self, wire, timeout, name="mpi"):
        self.wire = wire
        self.timeout = timeout
        self.name = name
        self.rank, self.size = wire.rank, wire.size
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.failure = None
        self.left = {}  # rank -> why, of processes whose program has ended
        self.shared: Any = None  # :class:`.shared.Shared`, whose exchanges are watched here and not moved
        self.direct: Any = None  # :class:`.direct.Direct`, if large arrays go to MPI where they are
        self.around = contextlib.nullcontext  # what a thread needs that calls MPI: the right GPU, as a rule none
        self._watching = False
        self._submitted: collections.deque = collections.deque()
        self._active: dict = {}  # name -> the exchange that meets there now
        self._touched: dict = {}  # exchanges that may be complete, in order
        self._queued: dict = {}  # name -> deque of those that follow
        self._early: dict = {}  # name -> deque of (source, letter) that came before their exchange here
        self._heard = dict.fromkeys(self.others, 0.0)
        self._spare: dict = {}  # size -> list of buffers for bulk
        self._next_look = 0.0
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._closing = False
        self._kept: list = []  # memory that MPI may still write to after a failure
        self._thread = None

    def submit(self, exchange):
        """Hand in an exchange; its `finish` is called later, from whichever thread drives the hub then."""
        self._submitted.append(exchange)
        if self._thread is None:
            self._start_thread()
        # Send it from here if nobody else is at it: waking the thread takes longer than a small message.
        if self._lock.acquire(blocking=False):
            try:
                self._turn()
            finally:
                self._lock.release()
            if self._idle():
                return
        self._work.set()

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
            if self._lock.acquire(blocking=False):
                try:
                    self._drive(ended)
                finally:
                    self._lock.release()
                if self._active or self._submitted or self.wire.sending:
                    self._start_thread()
                    self._work.set()
            else:
                ended.wait(0.01)  # whoever drives now ends this one as well
        if result[0] is not None:
            tell(result[0])
            raise result[0]

    def watch(self):
        """See to it that whoever does not come to an exchange through shared memory is found."""
        if not self._watching:
            self._watching = True
            self._start_thread()
            self._work.set()

    def check(self):
        """Raise what has ended this hub, if anything has."""
        if self.failure is not None:
            tell(self.failure)
            raise self.failure

    def fail(self, error, tell=True):
        """End every exchange with `error`, now and from now on; the other processes are told.

        Args:
            error: an exception.
            tell: whether the others do not know yet.
        """
        if self.failure is not None:
            return
        self.failure = error
        if tell:
            self._say(FAILED, f"{type(error).__name__}: {error}")
        self._abandon()
        self.around = contextlib.nullcontext  # what is still said comes from no GPU

    def close(self, reason="", limit=None):
        """Say good-bye, and wait until every other process has done so too.

        Args:
            reason: the error that ends this program early; the others are told.
            limit: seconds to wait for the others.

        Returns:
            The ranks that have not said good-bye.
        """
        limit = self.timeout if limit is None else limit
        deadline = time.monotonic() + (min(limit, _LAST_WORDS) if reason or self.failure else limit)
        self._closing = True  # so that whoever drives lets go of the lock
        with self._lock, self.around():
            self._say(LEFT, reason)
            nap = _Nap()
            while time.monotonic() < deadline and (self.wire.sending or not self._all_left()):
                nap.next(self._step())
        self._work.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self.timeout)
        if self.shared is not None:
            self.shared.close()
        return [rank for rank in self.others if rank not in self.left]

    def _all_left(self):
        return self.failure is not None or len(self.left) == len(self.others)

    # ------------------------------------------------------------------ the thread

    def _start_thread(self):
        with contextlib.suppress(RuntimeError):  # at the interpreter's end no thread starts; `wait` still works
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"gluon_parallel.{self.name}", daemon=True)
                self._thread.start()

    def _run(self):
        while not self._closing:
            self._work.wait()
            self._work.clear()
            with self._lock:
                self._drive(None)
            if self._watching:
                self._look_now_and_then()

    def _look_now_and_then(self):
        """While exchanges through shared memory are under way."""
        quiet = 0
        while not self._closing and quiet < _LOOKS:
            if self._work.wait(_LOOK):
                return  # messages are to be moved; then this goes on
            with self._lock:
                self._turn()
            quiet = 0 if self.shared.pending() else quiet + 1
        self._watching = False
        if self.shared.pending():  # it was pushed in this moment
            self.watch()

    def _drive(self, ended):
        """Move messages until `ended` is set, or until there is nothing to do; the lock is held."""
        # Where somebody waits here a layer stands still; else the devices compute, and need the core.
        nap = _Nap(growth=1.1 if ended is not None else 1.6)
        while not (ended.is_set() if ended is not None else self._idle()):
            nap.next(self._turn())

    def _turn(self):
        try:
            with self.around():
                return self._step()
        except Exception as error:  # of MPI itself; whoever waits must not wait for ever
            if not isinstance(error, GluonParallelError):
                error = WorkerLost(f"store {self.name!r}, process {self.rank}: MPI failed: {error}")
            self.fail(error)
            return True

    def _idle(self):
        return self._closing or not (self._active or self._submitted or (self.wire.sending and self.failure is None))

    # ------------------------------------------------------------------ one turn

    def _step(self):
        moved = bool(self._submitted)
        while self._submitted:
            self._take(self._submitted.popleft())
        self.wire.flush()
        if self.failure is not None:
            return moved
        arrived, more = self.wire.poll(self._place)
        if arrived:
            now = time.monotonic()
            for source, letter in arrived:
                self._heard[source] = now
                self._deliver(source, letter)
        if arrived or more:
            self.wire.flush()
            touched, self._touched = self._touched, {}
            for exchange in touched:
                if exchange.complete() and self._active.get(exchange.name) is exchange:
                    self._end(exchange)
            return True
        self._look_for_lost()
        return moved

    def _take(self, exchange):
        if self.failure is not None:
            exchange.finish(self.failure)
        elif exchange.name in self._active:
            self._queued.setdefault(exchange.name, collections.deque()).append(exchange)
        else:
            self._begin(exchange)

    def _begin(self, exchange):
        exchange.since = time.monotonic()
        self._active[exchange.name] = exchange
        exchange.touched = lambda one: self._touched.update({one: None})
        exchange.begin(self)
        for source, letter in self._early.pop(exchange.name, ()):
            if self.failure is None:
                self._deliver(source, letter)  # what this exchange does not want is put back, for the one after it
        if self.failure is None and exchange.complete():
            self._end(exchange)

    def _end(self, exchange):
        del self._active[exchange.name]
        exchange.finish(None)
        queue = self._queued.get(exchange.name)
        if queue:
            following = queue.popleft()
            if not queue:
                del self._queued[exchange.name]
            self._begin(following)

    def _deliver(self, source, letter):
        if letter.kind == FAILED:
            text = bytes(letter.payload).decode()
            self.fail(WorkerLost(f"store {self.name!r}: process {source} of {self.size} failed: {text}"), tell=False)
            return
        if letter.kind == LEFT:
            self.left[source] = bytes(letter.payload).decode()
            return
        exchange = self._active.get(letter.name)
        if exchange is None or not self._wants(exchange, source, letter):
            self._early.setdefault(letter.name, collections.deque()).append((source, letter))
            return
        self._compare(exchange, source, letter)
        if self.failure is None:
            exchange.receive(self, source, letter)
            self._touched[exchange] = None

    @staticmethod
    def _wants(exchange, source, letter):
        return source in exchange.missing or (letter.kind, source) in exchange.missing

    def _compare(self, exchange, source, letter):
        if exchange.form != letter.form:
            self.fail(
                WorkersDiffer(
                    f"store {self.name!r}, key {self._key(exchange.name)}: process {self.rank} sends "
                    f"{exchange.form.decode()}, process {source} sends {letter.form.decode()}. Every process must run "
                    "the same model, with parameters made in the same order"
                )
            )

    def _place(self, source, letter, size):
        exchange = self._active.get(letter.name)
        if exchange is not None and self._wants(exchange, source, letter):
            self._compare(exchange, source, letter)
            place = False if self.failure is not None else exchange.place(source, letter)
            if place is not False:
                return place
        elif letter.kind not in (PART, VALUE):
            return None
        spare = self._spare.get(size)
        return spare.pop() if spare else np.empty(size, np.uint8)

    def give_back(self, row):
        """Take back memory that bulk was received into, for the next time."""
        memory = row.view(np.uint8)
        self._spare.setdefault(memory.size, []).append(memory)

    # ------------------------------------------------------------------ failures

    def _look_for_lost(self):
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + min(0.05, self.timeout / 4)
        waiting = list(self._active.values())
        if self.shared is not None:
            waiting += self.shared.waiting()
            for rank in self.shared.heard():
                if rank in self._heard:
                    self._heard[rank] = now
        for exchange in waiting:
            missing = exchange.ranks_missing()
            for source, letter in self._other_letters(exchange):
                if source in missing:
                    self._compare(exchange, source, letter)
                if self.failure is not None:
                    return
            gone = [rank for rank in missing if rank in self.left and not self.wire.expects_from(rank)]
            if gone:
                self.fail(WorkerLost(f"{self._where(exchange)}: {self._ended(gone)}"))
                return
            heard = max([exchange.since, *(self._heard[rank] for rank in missing)])
            if now - heard > self.timeout or now - exchange.since > _MOST_LIMITS * self.timeout:
                ranks = ", ".join(map(str, sorted(missing))) or "nobody known"
                self.fail(
                    WorkerLost(
                        f"{self._where(exchange)}: waited {now - exchange.since:.3g} s for process {ranks}. It was "
                        "killed or stopped, or it runs fewer steps or other layers; look at its output. A longer "
                        "limit: GLUON_PARALLEL_TIMEOUT=seconds"
                    )
                )
                return

    def _other_letters(self, exchange):
        """Letters for its key from those who do the exchange in another way: they have another shape, as a rule."""
        names = getattr(exchange, "elsewhere", ())
        return [pair for name in names for pair in self._early.get(name, ())]

    def _ended(self, ranks):
        failed = [f"process {rank} has ended its program with {self.left[rank]}" for rank in ranks if self.left[rank]]
        if failed:
            return "; ".join(failed)
        names = ", ".join(map(str, sorted(ranks)))
        return f"process {names} has ended its program. Every process must take the same number of steps"

    def _where(self, exchange):
        return f"store {self.name!r}, key {self._key(exchange.name)}, process {self.rank} of {self.size}"

    @staticmethod
    def _key(name):
        return name.decode().partition(":")[2]

    def _say(self, kind, text):
        for rank in self.others:
            self.wire.post(rank, Letter(kind, b"", b"", text.encode()[:4000]))
        self.wire.flush()

    def _abandon(self):
        waiting = [*self._active.values(), *(one for queue in self._queued.values() for one in queue)]
        self._kept += waiting
        self._active, self._queued = {}, {}
        for exchange in waiting:
            exchange.finish(self.failure)
        while self._submitted:  # one by one: what an end sets free may hand in the next one meanwhile
            self._submitted.popleft().finish(self.failure)
        if self.shared is not None:
            self.shared.abandon(self.failure)


class _Nap:
    """Waiting that first gives the core away and soon sleeps: on few cores the one who is waited for needs it."""

    def __init__(self, growth=1.1):
        self._growth = growth
        if not getattr(_precise, "is_set", False):
            _libc.prctl(_TIMER_SLACK, 1000, 0, 0, 0)  # this thread's naps end within a microsecond, not 50
            _precise.is_set = True
        self._turns, self._length = 0, _SHORTEST_NAP

    def next(self, moved):
        if moved:
            self._turns, self._length = 0, _SHORTEST_NAP
            return
        self._turns += 1
        if self._turns < _PATIENCE:
            _libc.sched_yield()
        else:
            time.sleep(self._length)
            self._length = min(self._length * self._growth, _LONGEST_NAP)
