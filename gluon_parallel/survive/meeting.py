"""Meeting of a new process and those that run: one communicator and one progress engine of all.

The new process opens a port and accepts, those that run connect: the other way round they would wait for ever for a new
process that dies before it connects.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np

from .. import launcher
from ..errors import WorkerLost
from ..kvstore.flight_recorder import RECORDER
from ..kvstore.mpi import pmix, startup
from ..kvstore.mpi.progress_engine import ProgressEngine
from ..kvstore.mpi.shared_memory.memory import map_memory
from ..kvstore.mpi.store import MPI
from ..kvstore.mpi.transport import MPI_LOCK, made_within_limit
from ..kvstore.state import forget
from ..native import function

_NUM_HANDLES = 256  # of communicators that are looked at
_JOB = 256  # bytes of the name of a job
_APART = 2.0  # seconds between the ends of two processes that MPI does not let go
_LETS_GO = 5.0  # seconds in which MPI ends a meeting after the loss of the new process, or a revoke, on a busy machine


class DidNotJoin(Exception):
    """The processes that run have not met the new one, and go on as they were."""


def open_port(store: MPI) -> str:
    """In a new process: the name of a port at which it can be met."""
    with MPI_LOCK:
        return store._progress.mpi.Open_port()


def accept(store: MPI, port: str) -> None:
    """In a new process: wait until those that run connect, however long that takes, and meet them through `store`."""
    progress = store._progress
    with MPI_LOCK, _meeting():
        between = progress.comm.Accept(port)
        comm = _merged(progress, between, is_new=True)
        ranks = _exchange_process_names(progress, comm, progress.ranks[0])
    _go_on_with(store, comm, ranks)


def connect(store: MPI, new: int, port: str) -> None:
    """In those that run, all at once, with nothing in flight: meet the new process of that number that waits at `port`.

    Raises:
        DidNotJoin: one of them could not meet it, so none has; they can exchange nothing before they have regrouped.
        WorkerLost: MPI did not come back within the limit.
    """
    progress, agrees = store._progress, threading.Event()  # it is set while this process agrees with the others

    def problem_of(stage: Callable[[], object], made: Sequence[int]) -> Any:
        """Run a stage; what has failed, here or in another process, for which the next stage would wait for ever."""
        problem: Any = None
        try:
            stage()
            if pmix.is_lost(new):
                raise ProcessLookupError(f"process {new} is lost")  # MPI may have taken our answer for its own
        except (progress.mpi.Exception, OSError) as error:
            problem = error
            _revoke(progress, made)  # others may wait in the middle for what this one does not send any more
        agrees.set()
        try:
            have_all = progress.comm.Agree(int(problem is None)) == 1
        except progress.mpi.Exception as error:  # one of those that run is lost; all of them hear so
            problem, have_all = problem or error, False
        agrees.clear()
        return None if have_all else problem or "another process could not meet it"

    @_meeting()
    def meet() -> tuple[Any, Any, Any]:
        found: list[Any] = []
        before, made = _handles(progress.mpi), list[int]()
        for stage in (
            lambda: found.append(_connected(progress, port)),
            lambda: found.append(_merged(progress, found[0], is_new=False)),
            lambda: found.append(_exchange_process_names(progress, found[1], progress.ranks[progress.rank])),
        ):
            problem = problem_of(stage, made)
            if problem is not None:
                _revoke(progress, made)
                for comm in found[1:2]:
                    comm.Revoke()  # the new process must not wait
                return None, None, problem
            made = made or [*_handles(progress.mpi) - before]  # with those of MPI's own, as soon as there are some
        return *found[1:], None

    has_ended = threading.Event()
    watch = threading.Thread(target=_end_if_held, args=(has_ended, agrees, progress, new), daemon=True)
    watch.start()
    try:
        with pmix.met_at(new, port):
            comm, ranks, problem = made_within_limit(progress, meet, 2 * progress.timeout + _APART * progress.size)
    finally:
        has_ended.set()
    if comm is None:
        text = f"store 'mpi', {progress.name}: its communicator was revoked, as a new process could not be met"
        progress.fail(WorkerLost(text), tell=False)  # at once, so that regrouping begins by its end
        raise DidNotJoin(f"MPI could not connect to it: {problem}")
    _go_on_with(store, comm, ranks)


def _end_if_held(has_ended: threading.Event, agrees: threading.Event, progress: ProgressEngine, new: int) -> None:
    """Have MPI give up a meeting from which it does not come back; or end this process, so that the others go on.

    The last resort: a loss or an error of which MPI does not learn. It may also wait for a process that has given up,
    and a revoke ends that.
    """
    began, lost, has_revoked = time.monotonic(), np.inf, False
    while not has_ended.wait(0.2):
        now = time.monotonic()
        lost = min(lost, now) if pmix.is_lost(new) else np.inf
        held = now - min(lost + _LETS_GO, began + progress.timeout)
        if held > 0 and not has_revoked:
            has_revoked = True
            function("gp_revoke_in_meeting", 1)(progress.mpi._handleof(progress.comm))
        # While it agrees, it waits for another one that MPI does not let go.
        if held > _LETS_GO + _APART * progress.rank and not agrees.is_set():
            others = {*progress.ranks} - {progress.ranks[progress.rank]}
            what_then = "no other is left" if all(map(pmix.is_lost, others)) else "the others go on"
            launcher.send(
                f"{launcher.SAYS}{progress.name} ends, as MPI has not come back from the meeting with process {new} "
                f"for {now - began:.0f} s; {what_then}"
            )
            os.kill(os.getpid(), signal.SIGKILL)


def _connected(progress: ProgressEngine, port: str) -> Any:
    return progress.comm.Connect(port if progress.rank == 0 else "")


def _revoke(progress: ProgressEngine, made: Sequence[int]) -> None:
    """End what is waited for in the communicator of those that run, and in those that were made for the meeting."""
    progress.comm.Revoke()
    for handle in made:
        with contextlib.suppress(progress.mpi.Exception):
            progress.mpi.Comm.f2py(handle).Revoke()


@contextlib.contextmanager
def _meeting() -> Iterator[None]:
    """A loss in this block ends what MPI makes in it, instead of having it tried again and again, or waited for."""
    function("gp_before_meeting", 0)()
    try:
        yield
    finally:
        function("gp_after_meeting", 0)()


def _handles(mpi: Any) -> set[int]:
    """The numbers of all communicators, those that MPI has made for itself included, as that of one side of `between`.

    MPI gives each a number for Fortran; small ones are given again.
    """
    found = set()
    for handle in range(_NUM_HANDLES):
        with contextlib.suppress(mpi.Exception):
            mpi.Comm.f2py(handle).Is_inter()
            found.add(handle)
    return found


def _merged(progress: ProgressEngine, between: Any, is_new: bool) -> Any:
    between.Set_errhandler(progress.mpi.ERRORS_RETURN)
    comm = between.Merge(is_new)  # those that run come first
    comm.Set_errhandler(progress.mpi.ERRORS_RETURN)
    return comm


def _exchange_process_names(progress: ProgressEngine, comm: Any, number: int) -> list[int]:
    """The numbers of all processes by rank; notes their places for messages to MPI."""
    job, rank = pmix.own_process_name()
    row = np.frombuffer(job.encode().ljust(_JOB, b"\0") + np.array([number, rank], np.int64).tobytes(), np.uint8)
    rows = np.empty((comm.size, row.size), np.uint8)
    request = comm.Iallgather([row, progress.mpi.BYTE], [rows, progress.mpi.BYTE])
    _wait(request.Test, progress.timeout)
    numbers = rows[:, _JOB:].copy().view(np.int64)
    jobs = [one.tobytes().rstrip(b"\0").decode() for one in rows[:, :_JOB]]
    for (each, rank), job in zip(numbers.tolist(), jobs):
        pmix.process_names[each] = job, rank
    return numbers[:, 0].tolist()


def _wait(is_done: Callable[[], bool], limit: float) -> None:
    deadline = time.monotonic() + limit
    while not is_done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing came within {limit:g} s")
        time.sleep(0.0005)


def _go_on_with(store: MPI, comm: Any, ranks: list[int]) -> None:
    """Exchange through the communicator of all from now on; :func:`share_memory` comes next."""
    before = store._progress
    if before not in startup.progress_engines:
        raise WorkerLost("another training of this program has met a new process already")
    for one in startup.progress_engines:
        one.retire()
    after = ProgressEngine(comm, before.timeout, ranks=ranks)
    startup.progress_engines[:] = [after]
    RECORDER.progress = after
    store.take_part_in(after)
    forget(store)


def share_memory(store: MPI) -> None:
    """All of them, as a loss may end it: give the exchanges the memory that processes of a host share."""
    progress = store._progress
    progress.shared = map_memory(progress)
    store.take_part_in(progress)
