"""Transport: messages between processes and new communicators over MPI, and pauses between polls; one lock for all."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...environment import MIN_PROCESSES
from ...errors import WorkerLost
from ..work import leave_without_waiting, wait_until

FAILED, LEFT, ASKED, ANSWERED = range(1, 5)  # what a message says; an agreement on keys has two kinds of its own
PACKET = 71  # MPI's tag
PICKLE = 4  # its protocol, the same in every Python

MPI_LOCK = threading.Lock()  # held around every call of MPI: two threads that drive its operations crash Open MPI


class Message(NamedTuple):
    """What one process tells another one about an exchange, or about itself."""

    kind: int
    name: bytes  # the key
    signature: bytes  # shape and dtype in words, to be compared
    payload: Any = None  # anything that pickle takes


class Messages:
    """One process's end of the messages through `comm`, an mpi4py communicator; used by one thread at a time."""

    def __init__(self, comm: Any, mpi: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._outbox: dict[int, list] = {}
        self._sending: list = []  # (request, what must live until it has gone)
        self._arriving: dict[int, collections.deque] = {}  # source -> (request, packet), in the order of sending
        self._status = mpi.Status()

    def post(self, rank: int, message: Message) -> None:
        """Send a message to `rank`; with the next :meth:`flush` it is on its way."""
        self._outbox.setdefault(rank, []).append(tuple(message))

    def flush(self) -> None:
        """Send what was posted."""
        for rank, messages in self._outbox.items():
            packet = pickle.dumps(messages, PICKLE)
            with contextlib.suppress(self._mpi.Exception):  # that process is gone; whoever waits for it finds out
                self._sending.append((self._comm.Isend([packet, self._mpi.BYTE], rank, PACKET), packet))
        self._outbox = {}

    def test_sending(self, has_failed: bool = False) -> None:
        """Have MPI go on with what was sent, and free what has gone; if `has_failed`, also what cannot go any more."""
        self._sending = [
            entry for entry in self._sending
            if not (has_ended(entry[0], self._mpi) if has_failed else entry[0].Test())
        ]  # fmt: skip

    def poll(self) -> list[tuple[int, Message]]:
        """The messages that have arrived, as (source, message), each source's in order; waits for nothing."""
        self.test_sending()
        while True:
            coming = self._comm.Improbe(self._mpi.ANY_SOURCE, PACKET, self._status)
            if coming is None:
                break
            packet = np.empty(self._status.Get_count(self._mpi.BYTE), np.uint8)
            queue = self._arriving.setdefault(self._status.Get_source(), collections.deque())
            queue.append((coming.Irecv([packet, self._mpi.BYTE]), packet))
        arrived = []
        for source, queue in self._arriving.items():
            while queue and queue[0][0].Test():
                arrived += [(source, Message(*one)) for one in pickle.loads(queue.popleft()[1])]
        return arrived

    def under_way(self) -> list[tuple]:
        """(request, packet that must live until MPI is done with it) of each message that goes or comes."""
        return [*self._sending, *itertools.chain.from_iterable(self._arriving.values())]

    @property
    def sending(self) -> bool:
        """Whether something posted has not gone yet."""
        return bool(self._sending or self._outbox)


def has_ended(request: Any, mpi: Any) -> bool:
    """Whether MPI is done with a request: carried out, or given up where a process is lost or all is revoked."""
    try:
        return request.Test()
    except mpi.Exception:  # given up
        return True


def made_within_limit(progress: Any, make: Callable[[], Any], limit: float | None = None) -> Any:
    """What ``make()`` returns, a call of MPI that all processes of a new communicator must make.

    WorkerLost: it takes longer than the limit, by default that of the progress engine, so a process has not come.
    """
    limit = progress.timeout if limit is None else limit
    made: list = []
    failures: list = []

    def run() -> None:
        try:
            with MPI_LOCK:
                made.append(make())
        except Exception as error:  # raised below, in the thread that asked
            failures.append(error)

    thread = threading.Thread(target=run, name="gluon_parallel.communicator", daemon=True)

    def has_ended(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    thread.start()
    advice = (
        "Every process must make the same groups in the same order, and hear of the same losses; look at their output"
    )
    try:
        wait_until(has_ended, limit, lambda: ("store 'mpi', a new communicator", progress.name), advice)
    except WorkerLost as error:
        leave_without_waiting()
        progress.fail(error, tell=False)  # the thread that waits in MPI keeps the lock: nothing can be sent any more
        raise
    if failures:
        if MIN_PROCESSES not in os.environ:  # else the others may go on without the process that is lost
            leave_without_waiting()
        failure = WorkerLost(f"store 'mpi', {progress.name}: MPI made no new communicator: {failures[0]}")
        progress.fail(failure, tell=False)  # so whoever asks knows that the group has failed, also before MPI says it
        raise failure from failures[0]
    return made[0]


_libc = ctypes.CDLL(None)  # called this way it lets go of the interpreter's lock as well
_precise = threading.local()
_TIMER_SLACK = 29  # prctl's number for it
_SHORTEST, _LONGEST = 10e-6, 500e-6  # seconds of sleep
_NUM_YIELDS = 10  # polls that find nothing before the first sleep


class Backoff:
    """Waits between polls. On few cores the process that is waited for needs the core."""

    def __init__(self, growth: float = 1.1) -> None:
        self._growth = growth
        if not getattr(_precise, "is_set", False):
            _libc.prctl(_TIMER_SLACK, 1000, 0, 0, 0)  # this thread's sleep ends within a microsecond, not 50
            _precise.is_set = True
        self._num_idle, self._length = 0, _SHORTEST

    def next(self, moved: bool) -> None:
        """Wait, unless the last poll has `moved` something."""
        if moved:
            self._num_idle, self._length = 0, _SHORTEST
            return
        self._num_idle += 1
        if self._num_idle < _NUM_YIELDS:
            _libc.sched_yield()
        else:
            time.sleep(self._length)
            self._length = min(self._length * self._growth, _LONGEST)
