"""Mapping of one shared memory into all processes of a host, where they can have one."""

import contextlib
import hashlib
import mmap
import os

import numpy as np

from ...flight_recorder.sharing import host
from .layout import FUTEX
from .memory import SharedMemory

SWITCH = "GLUON_PARALLEL_SHARED_MEMORY"  # 0: everything goes by messages


def share(progress):
    """Shared memory for the processes of `progress`, or None if they cannot have it; collective.

    They can if all run on one host, as one user, and see each other's processes. The memory has no name in any
    folder, so nothing of it outlives the processes, however they end.
    """
    if progress.size == 1:
        return None
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # of addresses; memory it takes as it is used
    with contextlib.ExitStack() as closing:
        file, memory = -1, None
        if progress.rank == 0:
            with contextlib.suppress(OSError):
                file = os.memfd_create("gluon_parallel")
                closing.callback(os.close, file)
                os.ftruncate(file, size)
        host = np.frombuffer(hashlib.sha256(_host(progress.rank).encode()).digest(), np.int64)
        rows = progress.gather(b"shared:memory", b"", np.array([os.getpid(), file, size, *host]))
        process, number, size = rows[0, :3]
        if (rows[:, 3:] != host).any() or number < 0:
            return None
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{process}/fd/{number}", "r+b", buffering=0) as opened:
                memory = mmap.mmap(opened.fileno(), int(size))
        opened_everywhere = progress.gather(b"shared:opened", b"", np.array([memory is not None]))
    return SharedMemory(progress, memory) if opened_everywhere.all() else None


def _host(rank):
    """What must be equal for processes to share memory; where it cannot be used, unlike any other's."""
    naive = os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"  # it knows no function that ends later
    if naive or not FUTEX or os.environ.get(SWITCH, "1") == "0":
        return f"process {rank}"
    try:
        return host()
    except OSError:
        return f"the host of process {rank}"
