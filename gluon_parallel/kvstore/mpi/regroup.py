"""Regrouping after a loss: the processes that are left get a communicator and a progress engine of their own."""

from __future__ import annotations

import time

from ...errors import WorkerLost
from .. import flight_recorder
from . import ending
from .communicators import made_within_limit
from .messages import MPI_LOCK, has_ended
from .progress_engine import ProgressEngine
from .shared_memory.mapping import map_memory

_NOTICED = 10.0  # seconds within which MPI has noticed the end of a process that the exchanges have failed by

# (request, what must live until MPI is done with it), of groups that have failed; let go at this or the next regrouping
_abandoned: list = []


def regroup(progress: ProgressEngine) -> ProgressEngine:
    """The progress engine of the processes that are left; all of them call it, with nothing in flight.

    Args:
        progress: that of all processes, which has failed. It is ended, and so are those of parts of its processes.

    Raises:
        WorkerLost, WorkersDiffer: what has ended `progress`, where MPI has lost no process.
        WorkerLost: a process that is left did not come within the limit.
    """
    while True:
        progress = _shrunk(progress)
        try:
            progress.shared = map_memory(progress)
            return progress
        except Exception:
            if progress.failure is None and not _has_lost(progress):
                raise  # else the next process has been lost


def _shrunk(progress: ProgressEngine) -> ProgressEngine:
    """A progress engine of the processes that are left, in the place of those that are there."""
    comm, mpi = progress.comm, progress.mpi
    deadline = time.monotonic() + _NOTICED
    if progress not in ending.registered:
        raise WorkerLost("a process was lost, and another training of this program has gone on without it already")
    if any(progress.lost.left.values()):
        progress.check()  # it has ended with an error, which it would raise in the others too
    while not _has_lost(progress):
        if time.monotonic() > deadline:
            progress.check()
        time.sleep(0.005)
    with MPI_LOCK:
        for one in ending.registered:  # whoever has noticed nothing yet does now
            for circle in {*one.circles.values()}:
                circle.comm.Revoke()
    for one in ending.registered:
        one.retire()
        _abandoned.extend((request, operation.used_by_mpi()) for operation, request in one.started.items())
        _abandoned.extend(one.messages.under_way())
    left = made_within_limit(progress, comm.Shrink)
    with MPI_LOCK:
        _abandoned[:] = [entry for entry in _abandoned if not has_ended(entry[0], mpi)]
    left.Set_errhandler(mpi.ERRORS_RETURN)
    places = mpi.Group.Translate_ranks(left.Get_group(), None, comm.Get_group())
    after = ProgressEngine(left, progress.timeout, ranks=[progress.ranks[place] for place in places])
    ending.registered[:] = [after]
    flight_recorder.RECORDER.progress = after
    return after


def _has_lost(progress: ProgressEngine) -> bool:
    if not MPI_LOCK.acquire(timeout=progress.timeout):
        raise WorkerLost(f"store 'mpi', {progress.name}: MPI did not return to a thread that has called it")
    try:
        progress.mpi.COMM_SELF.Iprobe()  # MPI notices it in a call that moves messages
        return progress.comm.Is_revoked() or progress.comm.Get_failed().size > 0
    finally:
        MPI_LOCK.release()
