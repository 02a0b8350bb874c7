"""End of a process that uses MPI: wait for the others, or tell them why this process ends early."""

import atexit
import os
import sys

from ...compat import mx
from ...engine import settle
from ...engine.failures import is_told

_FAREWELL = 10  # limits; at the end rank 0 may still evaluate and write

registered: list = []  # the progress engine of this process
_reasons: list = []  # why this process will end early, the first one first


def register(progress):
    """At the end of the program, tell the other processes of this progress engine so, and wait for them."""
    registered.append(progress)
    atexit.register(_leave)


def leave_because(reason):
    """Remember why this process will end early, in words, for the others to be told: an exit status says little."""
    _reasons.append(reason)


def tell_others(reason):
    """Let the other processes know that this one is about to end early; they stop waiting for it at once.

    At the end of a program this happens by itself, unless it leaves through ``os._exit``. The `reason` in words is used
    unless :func:`leave_because` was told better ones.
    """
    for progress in registered:
        progress.close((*_reasons, reason)[0])


def _leave():
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
            print(f"gluon_parallel: {type(failure).__name__}: {failure}", file=sys.stderr)
    missing = progress.close(reason, _FAREWELL * progress.timeout)
    if progress.failure is None and not reason and not missing:
        if not MPI.Is_finalized():
            MPI.Finalize()
        return
    if progress.failure is None and not reason:
        print(f"gluon_parallel: process {progress.rank}: {missing} did not end within the limit", file=sys.stderr)
    elif uncaught is None and not reason and not is_told(progress.failure):
        print(f"gluon_parallel: {type(progress.failure).__name__}: {progress.failure}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # not through MPI_Finalize, which would wait for those who are gone
