"""End of a process that uses MPI: wait for the others, or tell them why this process ends early."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import TYPE_CHECKING

from ...compat import mx
from ...engine import settle
from ...engine.failures import is_reported
from ...errors import LOG
from .. import heartbeat
from ..environment import MIN_PROCESSES

if TYPE_CHECKING:
    from .progress_engine import ProgressEngine

_FAREWELL = 10  # limits; at the end rank 0 may still evaluate and write

registered: list = []  # the progress engines of this process: of all processes, and of parts of them
_reasons: list = []  # why this process will end early, the first one first


def register(progress: ProgressEngine) -> None:
    """At the end of the program, tell the other processes of this progress engine so, and wait for them."""
    registered.append(progress)
    atexit.register(_leave)


def leave_because(reason: str) -> None:
    """Remember why this process will end early, in words, for the others to be told: an exit status says little."""
    _reasons.append(reason)


def tell_others(reason: str) -> None:
    """Let the other processes know that this one is about to end early; they stop waiting for it at once.

    At the end of a program this happens by itself, unless it leaves through ``os._exit``. The `reason` in words is used
    unless :func:`leave_because` was told better ones.
    """
    for progress in registered:  # none in a process that has not used MPI, which must not begin with it now
        with contextlib.suppress(progress.mpi.Exception):  # of a process that has been lost meanwhile
            progress.close((*_reasons, reason)[0])


def _leave() -> None:
    """At the program's end: after success wait for the other processes; after a failure send them the reason alone."""
    from mpi4py import MPI

    progress = registered[0]
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
    for part in registered[1:]:
        part.close(reason, limit=0.0)
    try:
        missing = progress.close(reason, _FAREWELL * progress.timeout)
    except MPI.Exception:
        if MIN_PROCESSES not in os.environ:
            raise
        missing = []
        if was_done and progress.failure is None:
            _exit(0)  # a process was lost that, like this one, was done
    if progress.failure is None and not reason and not missing:
        if not MPI.Is_finalized() and progress.size == MPI.COMM_WORLD.size:  # after a loss it may wait for ever
            MPI.Finalize()
        return
    if was_done and progress.failure is not None:
        heartbeat.send(heartbeat.WAS_DONE)  # another process failed later, and says why
    elif was_done:
        LOG.error(f"gluon_parallel: process {progress.rank}: {missing} did not end within the limit")
    elif uncaught is None and not reason and not is_reported(progress.failure):
        LOG.error(f"gluon_parallel: {type(progress.failure).__name__}: {progress.failure}")
    _exit(1)


def _exit(status: int) -> None:
    """Leave, but not through MPI_Finalize, which would wait for those who are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
