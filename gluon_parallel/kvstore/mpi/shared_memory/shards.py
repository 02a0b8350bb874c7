"""Reduce-scatter and all-gather, for the processes of one host: all arrays use the same rows in turn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....mxnet.engine import check, make_plain
from ....native.records import C, address_of
from ...handshake import compare_once
from ...protocols import Arrays, Bounds, Keys
from ..plan import Pushes, are_on_host
from .rows import SHARD_DTYPES
from .sums import KeySums, SharedSum

# Bytes of a row: fits the cache, and holds a matrix of 1024 x 1024 with its bias.
ROW = (4 << 20) + (64 << 10)


class SharedShards(KeySums):
    """Reduce-scatter and all-gather of all arrays of one dtype, through two rows per process.

    All processes call in the same order, so the rows are as large as one exchange, not as all arrays.
    """

    kind, twice = "shards", ROW

    def __init__(self, shared: Any, name: bytes, signature: bytes, _shape: Any, dtype: np.dtype) -> None:
        self._row_values = ROW // dtype.itemsize
        super().__init__(shared, name, signature, [self._row_values], dtype)
        # gathers -> (arrays, bounds, pushes) of the last time alone, as they keep the arrays alive.
        self._pushes_of: dict[bool, tuple[list, Bounds, Pushes]] = {}

    def exchange_shards(self, arrays: Arrays, bounds: Bounds, gathers: bool) -> None:
        """Reduce-scatter values to their owners, or all-gather them from the owners; returns at once.

        A reduce-scatter frees the memory of values that others own; they become zero.

        Args:
            arrays: lists of one NDArray per CPU device; if they are gathered, the first one of each has the owner's.
            bounds: for each list, where the processes' shards begin, and the end.
            gathers: all-gather, else reduce-scatter.
        """
        self.shared.progress.check()
        check()
        if not self.knows(arrays, bounds, gathers):
            all_arrays = [*itertools.chain.from_iterable(arrays)]
            make_plain(*all_arrays)
            self._pushes_of.pop(gathers, None)  # frees its exchanges for the new plan
            self._pushes_of[gathers] = all_arrays, bounds, self._pushes(arrays, bounds, gathers)
        self._pushes_of[gathers][2].push()

    def knows(self, arrays: Arrays, bounds: Bounds, gathers: bool) -> bool:
        """Whether these arrays, in these shards, were summed, or with `gathers` gathered, the last time."""
        known = self._pushes_of.get(gathers)
        ours = [*map(id, itertools.chain.from_iterable(arrays))]
        return known is not None and ours == [*map(id, known[0])] and known[1] == bounds

    def _pushes(self, arrays: Arrays, bounds: Bounds, gathers: bool) -> Pushes:
        """What starts the exchanges of these arrays, each of what fits into a row."""
        exchanges: list[SharedSum] = []
        members: list[tuple[Sequence[Any], np.ndarray]] = []
        room = 0
        for copies, ends in zip(arrays, bounds):
            size = copies[0].size
            for begin in range(0, size, self._row_values):
                end = min(begin + self._row_values, size)
                if end - begin > room and members:
                    exchanges.append(self._exchange_of(members, gathers))
                    members = []
                room = (room if members else self._row_values) - (end - begin)
                members.append((copies, np.clip(ends, begin, end)))
        exchanges += [self._exchange_of(members, gathers)] if members else []
        return Pushes(self.shared, exchanges, [-number for number in range(len(exchanges))])

    def _exchange_of(self, members: list[tuple[Sequence[Any], np.ndarray]], gathers: bool) -> SharedSum:
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
        exchange.record.gathers, exchange.record.releases = gathers, not gathers
        exchange.record.num_bytes = int(lengths.sum()) * self.itemsize
        return exchange


def exchange_in_shared_memory(store: Any, keys: Keys, arrays: Arrays, bounds: Bounds, gathers: bool) -> list[int]:
    """Sum and gather shards of arrays in the memory of the only host, where they can be.

    Args:
        store: the store.
        keys, arrays, bounds: as of :meth:`.ShardedSums.gather_shards`.
        gathers: as of :meth:`.SharedShards.exchange_shards`.

    Returns:
        The indices of the keys whose arrays are not exchanged here.
    """
    store.check()
    for shards in store.shared_shards:
        if shards.knows(arrays, bounds, gathers):  # all of them, which need no second look
            shards.exchange_shards(arrays, bounds, gathers)
            return []
    shared = store._progress.shared
    found: dict[str, list[int]] = {}
    others = []
    for number, (key, outs) in enumerate(zip(keys, arrays)):
        store._check(key, outs)
        is_taken = shared is not None and shared.num_hosts == 1 and outs[0].dtype in SHARD_DTYPES and outs[0].size
        if is_taken and are_on_host(outs) and (gathers or not store._compresses(key, outs[0])):
            found.setdefault(np.dtype(outs[0].dtype).name, []).append(number)
        else:
            others.append(number)
    for dtype, numbers in found.items():
        chosen = [arrays[one] for one in numbers], [bounds[one] for one in numbers]
        shards = shared.rows_of(SharedShards, f"{store._number}a:arrays of {dtype}".encode(), b"", None, dtype)
        if not shards.knows(*chosen, gathers):  # its rows are those of all arrays: nothing else compares these
            compare_once(store, [keys[one] for one in numbers], *chosen)
        store.shared_shards.add(shards)
        shards.exchange_shards(*chosen, gathers)
    return others
