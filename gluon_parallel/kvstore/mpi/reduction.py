"""Reduction of statistics: within each host through shared memory, then between hosts by MPI."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from ..exchange import combine
from .lost_workers import BETWEEN
from .shared_memory.gathers import SharedGather

if TYPE_CHECKING:
    from .progress_engine import ProgressEngine


class Reduction:
    """Reduction of one key's messages over all processes, call after call; every process gets the same bits.

    One process of each host gathers the messages of all hosts.
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
        self._group, self._name, self._signature = group, name, signature + BETWEEN

    def reduce(self, message: np.ndarray) -> np.ndarray:
        """The message of all processes, from that of this one."""
        with self._lock:
            if self._within is not None:
                message = self._combined(self._within.gather(message))
            if self._group is not None:
                message = self._combined(self._progress.gather(self._name, self._signature, message, self._group))
            return message if self._back is None else self._back.gather(message)[0]

    def _combined(self, rows: np.ndarray) -> np.ndarray:
        return combine(rows, self._direction, messages=True)


class Result(SharedGather):
    """Gathering by which the first process of a host, which has row 0, gives the result to the others of its host."""

    def ranks_missing(self, *_: Any) -> set[int]:
        """Those for which the first process waits."""
        return self.shared.progress.lost.ranks_behind(self, super().ranks_missing(), math.inf)
