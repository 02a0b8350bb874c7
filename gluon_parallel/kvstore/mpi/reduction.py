"""Reduction of statistics: within each host through shared memory, then between hosts by MPI."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import native
from ..cost import FEW
from ..exchange import combine
from .agreement import ProcessGroup
from .lost_workers import BETWEEN
from .operations import Operation
from .shared_memory.gathers import SharedGather
from .transport import MPI_LOCK

if TYPE_CHECKING:
    from .progress_engine import ProgressEngine


@functools.cache
def _mpi_operation(direction: int) -> Any:
    """MPI's handle of the C function."""
    from mpi4py import MPI

    handle = ctypes.c_int() if MPI._sizeof(MPI.Op) == ctypes.sizeof(ctypes.c_int) else ctypes.c_void_p()
    create = ctypes.CDLL(MPI.__file__).MPI_Op_create  # of the MPI that mpi4py is linked to
    # Not as commutative: some MPIs would then combine in another order on each process, and round differently.
    function = native.address(("gp_moments_operation", "gp_sums_operation")[direction])
    create(ctypes.c_void_p(function), 0, ctypes.byref(handle))
    return MPI.Op.fromhandle(handle.value or 0)


class Reduction:
    """Reduction of one key's messages over all processes, call after call; every process gets the same bits.

    One process of each host exchanges with the other hosts. Fewer than `FEW` hosts gather their messages; more combine
    them along a tree, by an operation of MPI.
    The messages are (length,); `direction` is 0 for moments, 1 for sums, see :func:`.combine`.
    """

    def __init__(self, progress: ProgressEngine, name: bytes, signature: bytes, length: int, direction: int) -> None:
        self._progress, self._direction = progress, direction
        self._lock = threading.Lock()
        shared, message = progress.shared, np.empty(length)
        self._within = self._back = None
        group = progress.everyone
        if shared is not None and shared.num_hosts < progress.size and shared.takes_vector(message):
            group = shared.group
            # Also on a host of one process, for all processes agree on the order in which keys get their memory.
            self._within = shared.gathers(name, signature, message)
            self._back = shared.gathers(name, signature + BETWEEN + b" for all", message, Result)
        self._circle, self._name, self._form = group, name, signature + BETWEEN
        self._operation: Any = None  # along the tree; None where messages are gathered
        if group is not None and len(group.ranks) >= FEW:
            self._message = np.empty(1 + length)
            with MPI_LOCK:
                self._operation = self._tree(group, name, self._form)

    def _tree(self, group: ProcessGroup, name: bytes, signature: bytes) -> Operation:
        mpi = self._progress.mpi
        one = mpi.DOUBLE.Create_contiguous(len(self._message)).Commit()
        arguments = mpi.IN_PLACE, [self._message, 1, one], _mpi_operation(self._direction)
        return Operation(group, name, signature, [("Allreduce", arguments, None)], self._message.nbytes)

    def reduce(self, message: np.ndarray) -> np.ndarray:
        """The message of all processes, from that of this one."""
        with self._lock:
            if self._within is not None:
                message = self._combined(self._within.gather(message))
            if self._circle is not None:
                message = self._between(message)
            return message if self._back is None else self._back.gather(message)[0]

    def _between(self, message: np.ndarray) -> np.ndarray:
        if self._operation is None:
            return self._combined(self._progress.gather(self._name, self._form, message, self._circle))
        filled = np.concatenate([[len(message)], message])
        self._progress.wait(self._operation, functools.partial(self._message.__setitem__, slice(None), filled))
        return self._message[1:].copy()

    def _combined(self, rows: np.ndarray) -> np.ndarray:
        return combine(rows, self._direction, messages=True)


class Result(SharedGather):
    """Gathering by which the first process of a host, which has row 0, gives the result to the others of its host."""

    def ranks_missing(self, *_: Any) -> set[int]:
        """Those for which the first process waits."""
        return self.shared.progress.lost.ranks_behind(self, super().ranks_missing(), math.inf)
