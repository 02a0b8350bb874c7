"""Sums and gathers of values with owners, for the processes of one host: all arrays use the same rows in turn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ....engine import make_plain
from ....native.records import C, address_of
from .sums import KeySums, SharedSum

if TYPE_CHECKING:
    from .memory import SharedMemory

# Bytes of a row: it stays in the cache, and takes a matrix of 1024 x 1024 with its bias.
ROW = (4 << 20) + (64 << 10)


class _Chunk(NamedTuple):
    """Arrays, or ranges of them, that travel together."""

    values: list  # NDArrays that are read
    outs: list  # and written
    segments: np.ndarray
    bounds: np.ndarray  # (segments, processes + 1), to which these point
    exchanges: list  # those over these arrays


class _Plan(NamedTuple):
    """What travels together of arrays, and in which parts."""

    ids: list[int]  # of the arrays, which the chunks keep alive
    bounds: Sequence
    chunks: list[_Chunk]

    def is_of(self, arrays: Sequence[Sequence[Any]], bounds: Sequence[Sequence[int]]) -> bool:
        return self.ids == list(map(id, itertools.chain.from_iterable(arrays))) and self.bounds == bounds


class SharedParts(KeySums):
    """Sums and gathers of all arrays of one dtype, through two rows per process.

    Their order is that of the calls, the same on all processes. So the rows are as large as one exchange, not as all
    arrays.
    """

    kind, twice = "parts", ROW

    def __init__(self, shared: SharedMemory, name: bytes, form: bytes, _shape: Any, dtype: str) -> None:
        self._row_values = ROW // np.dtype(dtype).itemsize
        super().__init__(shared, name, form, [self._row_values], dtype)
        # Whether arrays are gathered -> those of the last time; no more: they keep arrays alive.
        self._plans: dict[bool, _Plan] = {}

    def exchange(
        self,
        arrays: Sequence[Sequence[Any]],
        bounds: Sequence[Sequence[int]],
        gathers: bool,
        releases: bool = False,
    ) -> None:
        """Give the owners of values the sums over all processes, or all processes the owners' values; returns at once.

        Args:
            arrays: lists of one NDArray per CPU device; if they are gathered, the first one of each has the owner's.
            bounds: for each list, where the processes' parts begin, and the end.
            gathers: whether the owners' values are gathered, instead of summed.
            releases: what a process does not own may become zero, and its memory be given back.
        """
        self.shared.progress.check()
        if not self.knows(arrays, bounds, gathers):
            make_plain(*itertools.chain.from_iterable(arrays))
            self._plan(arrays, bounds, gathers)
        with self._lock:
            for number, chunk in enumerate(self._plans[gathers].chunks):
                exchange = self._exchange_of(chunk)
                exchange.record.gathers, exchange.record.releases = gathers, releases
                self._push(exchange, -number)

    def knows(self, arrays: Sequence[Sequence[Any]], bounds: Sequence[Sequence[int]], gathers: bool) -> bool:
        """Whether these arrays, in these parts, were summed, or with `gathers` gathered, the last time."""
        return gathers in self._plans and self._plans[gathers].is_of(arrays, bounds)

    def _plan(self, arrays: Sequence[Sequence[Any]], bounds: Sequence[Sequence[int]], gathers: bool) -> None:
        """Forget the arrays of the last time, which must not live on for this, and plan the exchange of these."""
        if gathers in self._plans:
            self._sums += itertools.chain.from_iterable(chunk.exchanges for chunk in self._plans.pop(gathers).chunks)
        for exchange in self._sums:
            exchange.forget()
        chunks: list[_Chunk] = []
        members: list[tuple[Sequence[Any], np.ndarray]] = []
        room = 0
        for copies, ends in zip(arrays, bounds):
            size = copies[0].size
            for begin in range(0, size, self._row_values):
                end = min(begin + self._row_values, size)
                if end - begin > room and members:
                    chunks.append(self._chunk(members, gathers))
                    members = []
                room = (room if members else self._row_values) - (end - begin)
                members.append((copies, np.clip(ends, begin, end)))
        chunks += [self._chunk(members, gathers)] if members else []
        ids = list(map(id, itertools.chain.from_iterable(arrays)))
        self._plans[gathers] = _Plan(ids, bounds, chunks)

    def _chunk(self, members: list[tuple[Sequence[Any], np.ndarray]], gathers: bool) -> _Chunk:
        bounds = np.array([ends for _, ends in members], np.int64)
        segments, lengths = np.zeros(len(members), C.Segment), bounds[:, -1] - bounds[:, 0]
        segments["num_values"] = [copies[0].size for copies, _ in members]
        first_values = np.cumsum(lengths) - lengths - bounds[:, 0]
        segments["offset"] = first_values * np.dtype(self.dtype).itemsize
        segments["bounds"] = address_of(bounds) + bounds.strides[0] * np.arange(len(members))
        outs = list(itertools.chain.from_iterable(copies for copies, _ in members))
        return _Chunk([copies[0] for copies, _ in members] if gathers else outs, outs, segments, bounds, [])

    def _exchange_of(self, chunk: _Chunk) -> SharedSum:
        """One that is not under way, over the arrays of this chunk."""
        for exchange in chunk.exchanges:
            if exchange.holds(chunk.values, chunk.outs):
                return exchange
        exchange = self._taken(self._sums, chunk.values, chunk.outs, chunk.segments)
        exchange.keeps = chunk
        num_values = int((chunk.bounds[:, -1] - chunk.bounds[:, 0]).sum())
        exchange.record.num_bytes = num_values * np.dtype(self.dtype).itemsize
        self._sums.remove(exchange)
        chunk.exchanges.append(exchange)
        return exchange
