"""Memory of the processes of each host, and the circle of one process of every host."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from ...flight_recorder.sharing import host
from ..agreement import Circle
from ..communicators import made_within_limit
from ..progress_engine import OF_LEADERS
from .memory import SharedMemory

if TYPE_CHECKING:
    from ..progress_engine import ProgressEngine

SWITCH = "GLUON_PARALLEL_SHARED_MEMORY"  # 0: every process is a host of its own


def map_memory(progress: ProgressEngine) -> SharedMemory | None:
    """Memory in which the C library sums for the processes of one host, or None if not all can have it; collective.

    One process alone has it too, since this is faster than MPI's operations.
    Processes share memory that run on one host, as one user, and see each other's processes. The memory has no name in
    any folder, so nothing of it outlives the processes, however they end.
    """
    # The naive engine knows no function that ends later.
    usable = os.environ.get("MXNET_ENGINE_TYPE") != "NaiveEngine"
    digest = np.frombuffer(hashlib.sha256(_host(progress.rank).encode()).digest(), np.int64)
    rows = progress.gather(b"hosts:name", b"", np.array([usable, os.getpid(), *digest]))
    if not rows[:, 0].all():
        return None
    # By host: its number is that of its first process, which speaks for it.
    names = [row.tobytes() for row in rows[:, 2:]]
    first = np.array([names.index(name) for name in names])
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # of addresses; memory it takes as it is used
    with contextlib.ExitStack() as closing:
        file, memory = -1, None
        if first[progress.rank] == progress.rank:
            with contextlib.suppress(OSError):
                file = os.memfd_create("gluon_parallel")
                closing.callback(os.close, file)
                os.ftruncate(file, size)
        files = progress.gather(b"hosts:memory", b"", np.array([file, size]))
        leader = first[progress.rank]
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{rows[leader, 1]}/fd/{files[leader, 0]}", "r+b", buffering=0) as opened:
                memory = mmap.mmap(opened.fileno(), int(files[leader, 1]))
        opened_by = progress.gather(b"hosts:opened", b"", np.array([memory is not None]))[:, 0]
    for rank in range(progress.size):  # where one process of a host cannot open it, each is a host of its own
        if not opened_by[first == first[rank]].all():
            names[rank] = f"process {rank}".encode()
    first = np.array([names.index(name) for name in names])
    leaders, members = np.unique(first).tolist(), np.flatnonzero(first == first[progress.rank]).tolist()
    if len(members) == 1:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0))
    circle = None
    if len(leaders) > 1:  # by Split, since Create_group waits for ever for a process that is lost meanwhile
        color = 0 if progress.rank in leaders else progress.mpi.UNDEFINED
        comm = made_within_limit(progress, lambda: progress.comm.Split(color, progress.rank))
    if len(leaders) > 1 and progress.rank in leaders:
        circle = Circle(progress, comm, leaders, OF_LEADERS)
        progress.circles.update(dict.fromkeys(OF_LEADERS, circle))
    return SharedMemory(progress, memory, members, len(leaders), circle)


def _host(rank: int) -> str:
    """What must be equal for processes to share memory; where they must not, unlike any other's."""
    if os.environ.get(SWITCH, "1") == "0":
        return f"process {rank}"
    try:
        return host()
    except OSError:
        return f"the host of process {rank}"
