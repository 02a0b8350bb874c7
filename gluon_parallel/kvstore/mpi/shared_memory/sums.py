"""Sums through shared memory: one key's exchanges, which the engine hands to the C library."""

from __future__ import annotations

import itertools
import math
import operator
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....engine import Call, fail
from ....native import address, function
from ....native.records import C, address_of
from ..agreement import key_of
from ..lost_workers import BETWEEN
from ..operations import CompressedSum, allreduce
from .rows import Rows, number_of

if TYPE_CHECKING:
    from ..compression import Half, TwoBits
    from .memory import SharedMemory


class KeySums(Rows):
    """Sums at one key, of one array per device or of several that travel together.

    Args:
        sizes: values of each of the arrays; they lie one behind the other in a row.
        codec: of :mod:`..compression`, if the hosts exchange their sums in fewer bits.
    """

    kind = "sum"

    def __init__(
        self,
        shared: SharedMemory,
        name: bytes,
        form: bytes,
        sizes: Sequence[int],
        dtype: str,
        codec: Half | TwoBits | None = None,
    ) -> None:
        super().__init__(shared, name, form, (sum(sizes),), dtype)
        self._codec = codec
        self._compressed: Any = None  # sums over the hosts in fewer bits
        self._result = np.empty(0)  # of the hosts
        segments = self._segments = np.zeros(len(sizes), C.Segment)
        segments["num_values"] = sizes
        segments["offset"][1:] = np.cumsum(sizes)[:-1] * np.dtype(dtype).itemsize
        self._sums: list = []
        self._operation: Any = None  # over the hosts
        self._number = 0
        self._lock = threading.Lock()
        self.record.dtype = number_of(dtype)
        shared.progress.announce(self)
        self._counts = shared.progress.counts[name]

    def prepare(self) -> None:
        self._segments["result"] = self.result + self._segments["offset"]
        shared = self.shared
        if shared.circle is not None:
            row, result = (
                shared.words[(address - shared.address) // 8 :].view(self.dtype)[: self.record.num_values]
                for address in (int(self._rows[0]), self.result)
            )
            form = self.form + BETWEEN
            if self._codec is None:
                self._operation = allreduce(shared.circle, self.name, form, result, row)
            else:
                self._compressed = CompressedSum(shared.circle, self.name, form, row, self._codec)
                self._operation, self._result = self._compressed.operation, result
            self._operation.size = None
            self._operation.prepare()
            self.record.number = shared.number_of(self)

    def start(self, number: int) -> None:
        """What the C library calls when all processes of this host have arrived."""

        def finish(error: Exception | None) -> None:
            if error is None:  # else the shared memory has failed as well
                if compressed is not None:
                    compressed.read(self._result)
                _summed(address_of(self.shared.host), address_of(self.record), number)

        compressed = self._compressed
        self._operation.call((lambda: None) if compressed is None else compressed.encode, finish)

    def ranks_summing(self) -> set[int]:
        """For whom this host waits: for those for which its first process waits, or for this one."""
        shared = self.shared
        if shared.num_hosts == 1:
            return set()
        if shared.circle is not None:
            return self._operation.ranks_missing()
        return shared.progress.lost.ranks_behind(self, shared.members[:1], math.inf)

    def push(self, values: Sequence[Any], outs: Sequence[Any], priority: int) -> None:
        """The arrays `outs` become the sum of all processes' `values`, when those are ready; returns at once.

        Args:
            values, outs: NDArrays of this process's CPU devices, in the plain layout; of several that travel together
                those of one after those of the other.
        """
        with self._lock:
            self._push(self._taken(self._sums, values, outs, self._segments), priority)

    def _taken(
        self, exchanges: list[SharedSum], values: Sequence[Any], outs: Sequence[Any], segments: np.ndarray
    ) -> SharedSum:
        """One of these exchanges, or a new one, over these arrays."""
        for exchange in exchanges:
            if exchange.fits(values, outs):
                break
        else:
            exchange = SharedSum(self, len(values), len(outs))
            exchanges.append(exchange)
        exchange.take(values, outs, segments)
        return exchange

    def push_again(self, values: Sequence[Any], outs: Sequence[Any], priority: int) -> bool:
        """The same if these are the arrays of an earlier time, which need no second look; whether it was done."""
        self.shared.progress.check()
        with self._lock:
            for exchange in self._sums:
                if exchange.holds(values, outs):
                    self._push(exchange, priority)
                    return True
        return False

    def _push(self, exchange: SharedSum, priority: int) -> None:
        self._number += 1
        self._counts[self.form] = self._number
        try:
            exchange.push(self._number, priority)
        except Exception:  # not Ctrl-C, which may come when the engine has the exchange
            self._number -= 1
            exchange.record.state = C.IDLE
            raise
        progress = self.shared.progress
        if progress.failure is not None:  # since the caller looked
            exchange.fail(progress.failure)
        progress.watch()


class SharedSum:
    """One exchange at a time of one key, over so many arrays."""

    keeps: Any = None  # what must live as long as it

    def __init__(self, key: KeySums, num_read: int, num_written: int) -> None:
        self.name, self.form = key.name, key.form
        self.seen, self.since = 0, 0.0  # which number is waited for, since when
        self._key = key
        self._num_read, self._num_written = num_read, num_written
        self._arrays: list = []
        self._call: Any = None
        self._segments = np.empty(0, C.Segment)
        self._handles, self._addresses = np.zeros((2, num_read + num_written), np.int64)
        self.record = C.HostExchange(num_read=num_read, num_written=num_written)
        self.record.host, self.record.key = address_of(key.shared.host), address_of(key.record)
        self.record.handles, self.record.arrays = address_of(self._handles), address_of(self._addresses)
        key.shared.enter(self)

    def fits(self, values: Sequence[Any], outs: Sequence[Any]) -> bool:
        """Whether nothing is under way, and the arrays are as many."""
        idle = self.record.state == C.IDLE
        return idle and len(values) == self._num_read and len(outs) == self._num_written

    def holds(self, values: Sequence[Any], outs: Sequence[Any]) -> bool:
        """Whether nothing is under way, and these are the arrays of the last time."""
        known = self._call is not None and self.fits(values, outs)
        return known and all(map(operator.is_, itertools.chain(values, outs), self._arrays))

    def forget(self) -> None:
        """Keep the arrays of the last time no longer, unless they are under way."""
        if self.record.state == C.IDLE:
            self._arrays, self._call, self.keeps = [], None, None

    def take(self, values: Sequence[Any], outs: Sequence[Any], segments: np.ndarray) -> None:
        """Use these arrays, of which `segments` tells where they lie in a row, from now on."""
        self._arrays, self._segments = [*values, *outs], segments
        self.record.num_segments, self.record.segments = len(segments), address_of(segments)
        self.record.num_bytes = int(segments["num_values"].sum()) * np.dtype(self._key.dtype).itemsize
        self._handles[:] = [array.handle.value for array in self._arrays]
        title = f"gluon_parallel.mpi key {key_of(self.name)}"
        self._call = Call(_BEGIN, address_of(self.record), values, outs, title)

    def push(self, number: int, priority: int) -> None:
        """Hand the exchange of this number to the engine."""
        self.record.number = number
        self.record.state = C.PUSHED
        self._call.push(priority)

    def fail(self, error: Exception) -> None:
        """Each array that was to be written raises `error`: the engine forgets as soon as one of them is read."""
        fail(self._arrays[self._num_read + 1 :], error)

    def ranks_missing(self) -> set[int]:
        """From whom something is still to come."""
        number = self.seen
        if self.record.state == C.HOLDING:
            return self._key.ranks_missing("left", number - self._key.depth)
        return self._key.ranks_missing("arrived", number) or self._key.ranks_summing()


_summed, _BEGIN = function("gp_summed", 3), address("gp_begin_exchange")
