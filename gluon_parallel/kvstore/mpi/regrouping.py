"""Regrouping: the processes that are left after a loss get a communicator and a progress engine of their own."""

from __future__ import annotations

import time
from typing import Any

from ...environment import min_processes
from ...errors import WorkerLost
from .. import flight_recorder, separate_training
from ..state import forget
from . import startup
from .progress_engine import ProgressEngine
from .shared_memory.memory import map_memory
from .transport import MPI_LOCK, has_ended, made_within_limit

_NOTICED = 10.0  # seconds within which MPI has noticed the end of a process that the exchanges have failed by

# (request, what must live until MPI is done with it), of groups that have failed; let go at this or the next regrouping
_abandoned: list = []


def regroup(store: Any) -> list[int]:
    """As of :class:`.Regrouping`, of a store ``mpi``."""
    before = list(store.ranks)
    progress = _regrouped(store._progress)
    lost = sorted({*before} - {*progress.ranks})
    store.take_part_in(progress)
    forget(store)
    separate_training.note_losses(progress.size)
    least = min_processes()
    if least is not None and progress.size < least:
        names = ", ".join(map(str, lost))
        raise WorkerLost(f"process {names} was lost, and {progress.size} are left of the {least} that must go on")
    return lost


def _regrouped(progress: ProgressEngine) -> ProgressEngine:
    """The progress engine of the processes that are left; `progress`, that of all, and those of groups are ended."""
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
    if progress not in startup.progress_engines:
        raise WorkerLost("a process was lost, and another training of this program has gone on without it already")
    if any(progress.lost.left.values()):
        progress.check()  # it has ended with an error, which it would raise in the others too
    while not _has_lost(progress):
        if time.monotonic() > deadline:
            progress.check()
        time.sleep(0.005)
    with MPI_LOCK:
        for one in startup.progress_engines:  # whoever has noticed nothing yet does now
            for group in {*one.groups.values()}:
                group.comm.Revoke()
    for one in startup.progress_engines:
        one.retire()
        _abandoned.extend((request, operation.used_by_mpi()) for request, operation in one.started)
        _abandoned.extend(one.messages.under_way())
    left = made_within_limit(progress, comm.Shrink)
    with MPI_LOCK:
        _abandoned[:] = [entry for entry in _abandoned if not has_ended(entry[0], mpi)]
        left.Set_errhandler(mpi.ERRORS_RETURN)
        ranks = mpi.Group.Translate_ranks(left.Get_group(), None, comm.Get_group())
    after = ProgressEngine(left, progress.timeout, ranks=[progress.ranks[rank] for rank in ranks])
    startup.progress_engines[:] = [after]
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
