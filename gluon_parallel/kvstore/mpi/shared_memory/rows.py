"""Rows of one key in a host's shared memory, and the gathering and reduction of small vectors through them."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import time
from typing import Any

import numpy as np

from ....native import function, locked, new_mutex, unlocked
from ....native.records import C, address_of
from ...exchange import combine
from ...flight_recorder import RECORDER
from ..lost_workers import BETWEEN
from ..operations import DTYPES

LINE = ctypes.sizeof(C.Line)
SHARD_DTYPES = DTYPES[:3]  # of arrays of which processes have shards
TWICE = 64 * 1024  # bytes up to which a key has two rows per process, so that nobody waits for a slow reader


class Rows:
    """Rows of one key, `HostKey` of `native/host.h`; they get memory when all processes have agreed on the key.

    See :meth:`agreed`.
    """

    kind: str  # in the flight recorder
    twice = TWICE  # bytes up to which there are two rows per process
    since = 0.0  # when the present wait began: for the agreement on the key, later for a late vector

    def __init__(self, shared: Any, name: bytes, signature: bytes, shape: tuple[int, ...], dtype: Any) -> None:
        self.shared, self.name, self.signature = shared, name, signature
        self.shape, self.dtype = shape, np.dtype(dtype)
        size = int(np.prod(shape)) * self.dtype.itemsize
        self._row = size + -size % LINE
        num = len(shared.members)
        # Between hosts there is one result at a time: MPI's operation has one row for it.
        self._has_result = self.kind == "sum" and shared.num_hosts > 1
        self.depth = 2 if size <= self.twice and not self._has_result else 1
        self._rows = np.zeros(self.depth * num, np.int64)  # addresses
        self.record = C.HostKey(num_values=int(np.prod(shape)), depth=self.depth, rows=address_of(self._rows))
        self.record.name = RECORDER.number_of(self.kind, *RECORDER.kind_key_label(name)[1:])

    def ranks_missing(self, which: str = "arrived", number: int = 0) -> set[int]:
        """The other ranks whose `Line` does not have `which` at `number` yet; this process may be late as well."""
        progress, members = self.shared.progress, self.shared.members
        if self.record.next_number == 0:
            return progress.lost.ranks_behind(self, range(progress.size), 1)
        lines = (C.Line * len(members)).from_address(self.record.lines)
        return {rank for rank, line in zip(members, lines) if getattr(line, which) < number} - {progress.rank}

    def prepare(self) -> None:
        """What else all processes do in the same order before the first exchange."""

    def agreed(self) -> None:
        """All processes have come to this key: take its memory, in the same order on each."""
        shared, num = self.shared, len(self.shared.members)
        self.num_bytes = num * LINE + (len(self._rows) + self._has_result) * self._row
        offset = shared.allocate(self.num_bytes)
        rows = shared.address + offset + num * LINE
        self._rows[:] = rows + self._row * np.arange(len(self._rows))
        self.result = rows + (len(self._rows) if self._has_result else 0) * self._row  # the sum over the hosts
        self.record.lines = shared.address + offset
        self.prepare()
        self.record.next_number = 1
        shared.look()


class SharedGather(Rows):
    """Allgather at one key: every process gets the vectors of all; calls have one order on all processes."""

    kind = "gather"

    def __init__(self, shared: Any, name: bytes, signature: bytes, shape: tuple[int, ...], dtype: np.dtype) -> None:
        super().__init__(shared, name, signature, shape, dtype)
        self.record.num_values *= dtype.itemsize  # bytes
        self._mutex = new_mutex()  # the C library holds it too
        self.num_processes = len(shared.members)
        self._announced, self._agreed = False, threading.Event()
        self._first: np.ndarray | None = None  # vector of the first call
        # addresses for the C struct `Processes`
        self.addresses = tuple(map(address_of, (self._mutex, shared.host, self.record)))

    def gather(self, vector: np.ndarray, has_begun: bool = False) -> np.ndarray:
        """The `vector` of each process of this host, by rank, (processes, *shape).

        `has_begun`: the C library has written this process's vector for this call already.
        """
        shared = self.shared
        out = np.empty((self.num_processes, *self.shape), self.dtype)
        with locked(self._mutex):
            if self.record.next_number == 0:  # the first call: others may be in another collective before it
                self._first = vector
                if not self._announced:  # else Ctrl-C has ended an earlier wait
                    self._announced = True
                    shared.progress.announce(self)
                shared.progress.wait_until(self._agreed)
            shared.progress.check()
            self.record.next_number += not has_begun
            where = *self.addresses[1:], self._number
            if not _gather(*where, 0 if has_begun else vector.ctypes.data, out.ctypes.data):
                self.since = time.monotonic()
                shared.late.add(self)
                try:
                    shared.progress.watch()
                    while not _gather(*where, 0, out.ctypes.data):
                        shared.progress.check()
                finally:
                    shared.late.discard(self)
        return out

    def left_to_others(self) -> contextlib.AbstractContextManager[None]:
        """A block in which other threads may gather, in a thread in which the C library has begun to."""
        return unlocked(self._mutex)

    def last(self) -> tuple[int, np.ndarray | None]:
        """How many vectors this process has handed in, those of the C library too, and the last one of them."""
        rank = self.shared.host.rank
        number = C.Line.from_address(self.record.lines + rank * LINE).arrived if self.record.next_number else 0
        if not number:
            return int(self._first is not None), self._first
        row = int(self._rows.reshape(self.depth, -1)[number % self.depth, rank])
        return number, np.frombuffer(ctypes.string_at(row, self.record.num_values), self.dtype).reshape(self.shape)

    def agreed(self) -> None:
        """Called by the progress engine when all processes have announced this key."""
        super().agreed()
        self._agreed.set()

    def ranks_missing(self, *_: Any) -> set[int]:
        """Ranks whose vector has not arrived."""
        return super().ranks_missing("arrived", self._number)

    @property
    def _number(self) -> int:
        """Number of the current or last call, from 1."""
        return self.record.next_number - 1


class Result(SharedGather):
    """Gathering by which the first process of a host, which has row 0, gives the result to the others of its host."""

    def ranks_missing(self, *_: Any) -> set[int]:
        """Those for which the first process waits."""
        return self.shared.progress.lost.ranks_behind(self, super().ranks_missing(), math.inf)


class Reduction:
    """Reduction of one key's messages over all processes, call after call; every process gets the same bits.

    Each host combines its messages; the first processes of the hosts gather and combine those, and give the result to
    their host. The messages are (length,); `direction` is 0 for moments, 1 for sums, see :func:`.combine`.
    """

    def __init__(self, progress: Any, name: bytes, signature: bytes, length: int, direction: int) -> None:
        self._progress, self._direction = progress, direction
        self._lock = threading.Lock()
        shared, message = progress.shared, np.empty(length)
        self._within = self._back = None
        group = progress.everyone
        if shared is not None and shared.num_hosts < progress.size and shared.takes_vector(message):
            group = shared.group
            # Also on a host of one process, for all processes agree on the order in which keys get their memory.
            self._within = shared.rows_of(SharedGather, name, signature, (length,), message.dtype)
            self._back = shared.rows_of(Result, name, signature + BETWEEN + b" for all", (length,), message.dtype)
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


_gather = function("gp_gather", 5)
