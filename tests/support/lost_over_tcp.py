"""Lose process 2 of three while a large array is on its way over TCP; the two others go on.

    OMPI_MCA_btl=self,tcp gluon-parallel launch -n 3 --min-processes 1 tests/support/lost_over_tcp.py sent

- `sent`: process 0 sends it to process 2, which has begun to receive it.
- `unexpected`: process 2 has sent it in a sum that the others have not begun.
- `late`: process 1 receives what process 2 had begun to send, and then another one from process 0.
"""

import faulthandler
import os
import signal
import sys
import time

if __name__ == "__main__":
    from mpi4py import MPI  # before the package, as a script may do

import numpy as np

import gluon_parallel as gp
from gluon_parallel import launcher

LARGE = 50_000_000  # bytes: more than the system takes at once
PART = 300_000  # more than MPI sends at once
SECONDS = 1.0  # in which the others hear of the loss
LIMIT = 60.0  # seconds after which a process that waits for ever ends


def moves(comm, seconds):
    """Let MPI go on."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            comm.Iprobe(0, 99)
        except MPI.Exception:  # it is revoked
            time.sleep(0.001)


def ends_within(comm, seconds, request):
    """Let MPI go on with a request; whether it was carried out."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and not request.Test():
            pass
    except MPI.Exception:
        return False
    return time.monotonic() < end


def lose(comm, moment):
    """What each of the three processes does."""
    values = np.ones(LARGE if moment == "sent" else PART, np.uint8)
    result = np.empty_like(values)
    if comm.rank == 2:
        if moment == "sent":
            comm.Probe(0)
            request = comm.Irecv(result, 0)  # tells process 0 to send it
            time.sleep(SECONDS / 2)  # the system takes a part of it
        else:
            request = comm.Isend(values, 1) if moment == "late" else comm.Iallreduce(values, result)
            ends_within(comm, SECONDS, request)
        os.kill(os.getpid(), signal.SIGKILL)
    if (comm.rank, moment) == (0, "sent"):
        assert not ends_within(comm, 10, comm.Isend(values, 2))
    moves(comm, 2 * SECONDS)
    if moment == "late" and comm.rank == 1:
        assert not ends_within(comm, 10, comm.Irecv(result, 2))
        comm.Recv(result, 0)
    elif moment == "late":
        comm.Send(values, 1)


def main():
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    store = gp.kvstore.create("mpi")
    store._progress.retire()  # its thread: from here on this script alone calls MPI
    comm = MPI.COMM_WORLD.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    launcher.send(launcher.GOES_ON)
    comm.Barrier()
    lose(comm, sys.argv[1])
    comm.Revoke()
    left = comm.Shrink()
    values = np.ones(PART)
    total = np.empty_like(values)
    left.Allreduce(values, total)
    print(f"{left.size} processes sum {total.min():g}", flush=True)
    os._exit(0)  # MPI's own end would wait for process 2


if __name__ == "__main__":
    main()
