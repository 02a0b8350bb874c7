"""Reduce-scatter and all-gather, for the processes of one host: all arrays use the same rows in turn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ....engine import check, make_plain
from ....native.records import C, address_of
from ...contract import Arrays, Bounds
from .sums import KeySums, Pushes, SharedSum

# Bytes of a row: fits the cache, and holds a matrix of 1024 x 1024 with its bias.
ROW = (4 << 20) + (64 << 10)


class _Plan(NamedTuple):
    """What travels together of arrays, and in which parts."""

    arrays: list  # which are kept alive
    bounds: Sequence
    pushes: Pushes

    def is_of(self, arrays: Arrays, bounds: Bounds) -> bool:
        ours = map(id, self.arrays)
        return [*ours] == list(map(id, itertools.chain.from_iterable(arrays))) and self.bounds == bounds


class SharedParts(KeySums):
    """Reduce-scatter and all-gather of all arrays of one dtype, through two rows per process.

    All processes call in the same order, so the rows are as large as one exchange, not as all arrays.
    """

    kind, twice = "parts", ROW

    def __init__(self, shared: Any, name: bytes, signature: bytes, _shape: Any, dtype: np.dtype) -> None:
        self._row_values = ROW // dtype.itemsize
        super().__init__(shared, name, signature, [self._row_values], dtype)
        # (gathers, releases) -> the last plan alone, as plans keep arrays alive.
        self._plans: dict[tuple[bool, bool], _Plan] = {}

    def exchange_parts(self, arrays: Arrays, bounds: Bounds, stages: Sequence[tuple[bool, bool]]) -> None:
        """Reduce-scatter values to their owners, or all-gather them from the owners; returns at once.

        Args:
            arrays: lists of one NDArray per CPU device; if they are gathered, the first one of each has the owner's.
            bounds: for each list, where the processes' parts begin, and the end.
            stages: (gathers, releases), run in order. gathers: all-gather, else reduce-scatter. releases: free the
                memory of values that others own; they become zero.
        """
        self.shared.progress.check()
        check()
        for stage in stages:
            if not self.knows(arrays, bounds, *stage):
                make_plain(*itertools.chain.from_iterable(arrays))
                self._plans.pop(stage, None)  # frees its exchanges for the new plan
                self._plans[stage] = self._plan(arrays, bounds, *stage)
            self._plans[stage].pushes.push()

    def knows(self, arrays: Arrays, bounds: Bounds, gathers: bool, releases: bool = False) -> bool:
        """Whether these arrays, in these parts, were summed, or with `gathers` gathered, the last time."""
        known = self._plans.get((gathers, releases))
        return known is not None and known.is_of(arrays, bounds)

    def _plan(self, arrays: Arrays, bounds: Bounds, gathers: bool, releases: bool) -> _Plan:
        exchanges: list[SharedSum] = []
        members: list[tuple[Sequence[Any], np.ndarray]] = []
        room = 0
        for copies, ends in zip(arrays, bounds):
            size = copies[0].size
            for begin in range(0, size, self._row_values):
                end = min(begin + self._row_values, size)
                if end - begin > room and members:
                    exchanges.append(self._exchange_of(members, gathers, releases))
                    members = []
                room = (room if members else self._row_values) - (end - begin)
                members.append((copies, np.clip(ends, begin, end)))
        exchanges += [self._exchange_of(members, gathers, releases)] if members else []
        pushes = Pushes(self.shared, exchanges, [-number for number in range(len(exchanges))])
        return _Plan([*itertools.chain.from_iterable(arrays)], bounds, pushes)

    def _exchange_of(self, members: list[tuple[Sequence[Any], np.ndarray]], gathers: bool, releases: bool) -> SharedSum:
        """The exchange of arrays, or ranges of them, that travel together."""
        bounds = np.array([ends for _, ends in members], np.int64)  # (segments, processes + 1)
        segments, lengths = np.zeros(len(members), C.Segment), bounds[:, -1] - bounds[:, 0]
        segments["num_values"] = [copies[0].size for copies, _ in members]
        first_values = np.cumsum(lengths) - lengths - bounds[:, 0]
        segments["offset"] = first_values * self.itemsize
        segments["bounds"] = address_of(bounds) + bounds.strides[0] * np.arange(len(members))
        outs = list(itertools.chain.from_iterable(copies for copies, _ in members))
        exchange = self.exchange([copies[0] for copies, _ in members] if gathers else outs, outs, segments)
        exchange.keeps = bounds
        exchange.record.gathers, exchange.record.releases = gathers, releases
        exchange.record.num_bytes = int(lengths.sum()) * self.itemsize
        return exchange
