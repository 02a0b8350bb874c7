"""Rows of one key in the memory of a host: one or two per process, at the same places for all of them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from ....compat.array_types import BFLOAT16
from ....native.records import C, address_of
from ...flight_recorder import RECORDER

if TYPE_CHECKING:
    from .memory import SharedMemory

LINE = ctypes.sizeof(C.Line)
DTYPES = *map(np.dtype, ("float32", "float64", "int32", "float16")), BFLOAT16  # by their numbers in `sums.h`
PARTS = DTYPES[:3]  # of arrays that are exchanged in parts
TWICE = 64 * 1024  # bytes up to which a key has two rows per process, so that nobody waits for a slow reader


class Rows:
    """One key's rows, once all processes have agreed on the order in which keys get theirs."""

    kind: str  # in the flight recorder
    twice = TWICE  # bytes up to which there are two rows per process
    since = 0.0  # when it was announced

    def __init__(self, shared: SharedMemory, name: bytes, signature: bytes, shape: tuple[int, ...], dtype: Any) -> None:
        self.shared, self.name, self.signature = shared, name, signature
        self.shape, self.dtype = shape, np.dtype(dtype)
        size = int(np.prod(shape)) * self.dtype.itemsize
        self._row = size + -size % LINE
        num = len(shared.members)
        # Between hosts there is one result at a time: MPI's operation has one place for it.
        self._has_result = self.kind == "sum" and shared.num_hosts > 1
        self.depth = 2 if size <= self.twice and not self._has_result else 1
        self._rows = np.zeros(self.depth * num, np.int64)  # addresses
        self.record = C.HostKey(num_values=int(np.prod(shape)), depth=self.depth, rows=address_of(self._rows))
        self.record.name = RECORDER.number_of(self.kind, *RECORDER.kind_key_label(name)[1:])

    def ranks_missing(self, which: str = "arrived", number: int = 0) -> set[int]:
        """The other ranks whose `Line` does not have `which` at `number` yet; this process may be late as well."""
        progress, members = self.shared.progress, self.shared.members
        if self.record.turn == 0:
            return progress.lost.ranks_behind(self, range(progress.size), 1)
        lines = (C.Line * len(members)).from_address(self.record.lines)
        return {rank for rank, line in zip(members, lines) if getattr(line, which) < number} - {progress.rank}

    def prepare(self) -> None:
        """What else all processes do in the same order before the first exchange."""

    def agreed(self) -> None:
        """All processes have come to this key: take its memory, in the same order on each."""
        shared, num = self.shared, len(self.shared.members)
        offset = shared.allocate(num * LINE + (len(self._rows) + self._has_result) * self._row)
        rows = shared.address + offset + num * LINE
        self._rows[:] = rows + self._row * np.arange(len(self._rows))
        self.result = rows + (len(self._rows) if self._has_result else 0) * self._row  # the sum over the hosts
        self.record.lines = shared.address + offset
        self.prepare()
        self.record.turn = 1
        shared.look()
