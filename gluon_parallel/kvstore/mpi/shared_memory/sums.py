"""Sums through shared memory: one key's exchanges, which the engine hands to the C library."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....errors import ExchangeError
from ....mxnet.arrays import addresses_of
from ....mxnet.engine import fail, make_room, without_repetition
from ....mxnet.engine.failures import remember
from ....native import provide
from ....native.records import C, address_of
from ..agreement import key_of
from ..lost_workers import BETWEEN
from ..operations import DTYPES, PairwiseExchange, allreduce, are_few
from ..python_sums import CompressedSum
from .rows import Rows

if TYPE_CHECKING:
    from ..python_sums import Half, TwoBits

# Keys by the number that `start_between_hosts` is given; a store that has ended is not kept for it.
_starts: weakref.WeakValueDictionary[int, KeySums] = weakref.WeakValueDictionary()
_numbers = itertools.count()
MANY = 6  # processes of which each sums a shard of a long row; fewer sum it whole, and wait once


class KeySums(Rows):
    """Sums at one key, of one array per device or of several that travel together, one behind the other in a row.

    :meth:`exchange` makes the exchanges of certain arrays. They sum over the devices of this process, too.

    Rows of halves are float32. With a `codec` of :mod:`..python_sums` the hosts exchange their sums in fewer bits.
    """

    kind = "sum"

    def __init__(
        self,
        shared: Any,
        name: bytes,
        signature: bytes,
        sizes: Sequence[int],
        dtype: np.dtype,
        codec: Half | TwoBits | None = None,
    ) -> None:
        super().__init__(shared, name, signature, (sum(sizes),), np.float32 if dtype.itemsize == 2 else dtype)
        self.itemsize = dtype.itemsize  # of the arrays
        self._codec = codec
        self._compressed: Any = None  # sums over the hosts in fewer bits
        self._result = np.empty(0)  # of the hosts
        segments = self._segments = np.zeros(len(sizes), C.Segment)
        segments["num_values"] = sizes
        segments["offset"][1:] = np.cumsum(sizes)[:-1] * self.dtype.itemsize
        self._free: list[SharedSum] = []  # those that no plan holds
        self._operation: Any = None  # over the hosts
        self._lock = threading.Lock()
        self.record.dtype = DTYPES.index(dtype)
        num = len(shared.members)
        self.record.sums_shards = len(sizes) == shared.num_hosts == 1 and num >= MANY and self._row > self.twice
        shared.progress.announce(self, self.record)

    def prepare(self) -> None:
        self._segments["result"] = self.result + self._segments["offset"]
        shared = self.shared
        if shared.group is not None:
            row, result = (
                shared.words[(address - shared.address) // 8 :].view(self.dtype)[: self.record.num_values]
                for address in (int(self._rows[0]), self.result)
            )
            signature = self.signature + BETWEEN
            if self._codec is None and len(shared.members) == 1 and are_few(shared.group, row):
                self._operation = PairwiseExchange(shared.group, self.name, signature, row)
                self.record.rows_of_hosts = address_of(self._operation.rows)
            elif self._codec is None:
                self._operation = allreduce(shared.group, self.name, signature, result, row)
            else:
                self._compressed = CompressedSum(shared.group, self.name, signature, row, self._codec)
                self._operation, self._result = self._compressed.operation, result
            self._operation.size, self._operation.keeps = None, shared  # which holds the arrays that MPI sends
            self.record.number = next(_numbers)
            _starts[self.record.number] = self

    def start(self, number: int) -> None:
        """What the C library calls when all processes of this host have arrived."""

        def finish(error: Exception | None) -> None:
            if error is None:  # else the shared memory has failed as well
                if compressed is not None:
                    compressed.read(self._result)
                self.shared.summed.append((address_of(self.record), number))

        compressed = self._compressed
        self._operation.call((lambda: None) if compressed is None else compressed.encode, finish)

    def ranks_summing(self, number: int) -> set[int]:
        """For whom this host waits: for those for which its first process waits, or for this one."""
        shared = self.shared
        if shared.num_hosts == 1:
            return self.ranks_missing("summed", number) if self.record.sums_shards else set()
        if shared.group is not None:
            return self._operation.ranks_missing()
        return shared.progress.lost.ranks_behind(self, shared.members[:1], math.inf)

    def exchange(self, values: Sequence[Any], outs: Sequence[Any], segments: np.ndarray | None = None) -> SharedSum:
        """One exchange, under way at most once at a time, by which `outs` become the sum of all processes' `values`.

        Args:
            values, outs: NDArrays of this process's CPU devices, in the plain layout; of several that travel together
                those of one after those of the other. They live as long as the exchange, or until it is released.
            segments: where they lie in a row; by default those of whole arrays.
        """
        with self._lock:
            idle = [one for one in self._free if one.record.state == C.IDLE]
            found = next((one for one in idle if one.lengths == (len(values), len(outs))), None)
            for one in idle:
                one.forget()
            if found is None:
                found = SharedSum(self, len(values), len(outs))
            else:
                self._free.remove(found)
        found.take(values, outs, self._segments if segments is None else segments)
        return found

    def release(self, exchange: SharedSum) -> None:
        """Use an exchange, and its twins, for other arrays from now on, when it is not under way."""
        self._free.extend(exchange.parted())  # without the lock: the garbage collector may call it at any time


def _start_between_hosts(number: int, call: int) -> int:
    """What the C library calls when all processes of this host have arrived at a call."""
    key = _starts.get(number)
    if key is None:
        return 0
    try:
        key.start(call)
    except BaseException as error:  # Ctrl-C too: it cannot cross C, and the other hosts wait
        progress = key.shared.progress
        if not isinstance(error, Exception):
            remember(error)
            error = ExchangeError(f"the exchange between hosts did not begin: {type(error).__name__}")
        progress.submit(functools.partial(progress.fail, error))
    return 0


class SharedSum:
    """One exchange at a time of one key, over so many arrays: `HostExchange` of `native/host.h`."""

    keeps: Any = None  # what must live as long as it

    def __init__(self, key: KeySums, num_read: int, num_written: int) -> None:
        self.key, self.name, self.signature = key, key.name, key.signature
        self.seen, self.since = 0, 0.0  # which number is waited for, since when
        self.lengths = num_read, num_written
        self._arrays: list = []
        self._twins: list[SharedSum] = []
        self._segments = np.empty(0, C.Segment)
        self._handles, self._once, self._addresses = np.zeros((3, num_read + num_written), np.int64)
        self.record = C.HostExchange(num_read=num_read, num_written=num_written)
        self.record.host, self.record.key = address_of(key.shared.host), address_of(key.record)
        self.record.handles, self.record.arrays = address_of(self._handles), address_of(self._addresses)
        self.record.once = address_of(self._once)
        self._title = ctypes.create_string_buffer(f"gluon_parallel.mpi key {key_of(self.name)}".encode())
        self.record.title = address_of(self._title)
        key.shared.enter(self)

    def forget(self) -> None:
        """Keep the arrays of the last time no longer; they are not under way."""
        self._arrays, self.keeps = [], None

    def take(self, values: Sequence[Any], outs: Sequence[Any], segments: np.ndarray) -> None:
        """Use these arrays, of which `segments` tells where they lie in a row, from now on."""
        make_room()
        self._arrays, self._segments = [*values, *outs], segments
        self.record.num_segments, self.record.segments = len(segments), address_of(segments)
        self.record.num_bytes = int(segments["num_values"].sum()) * self.key.itemsize
        self.record.gathers = self.record.releases = 0
        self._handles[:] = addresses_of(self._arrays)
        only_read, changed = without_repetition(values, outs)
        self.record.num_only_read, self.record.num_changed = len(only_read), len(changed)
        once = addresses_of((*only_read, *changed))
        self._once[: len(once)] = once
        device = outs[0].ctx
        self.record.device = device.device_typeid | device.device_id << 32

    def add_twin(self) -> None:
        """Make another exchange over the same arrays, for when this one is still under way."""
        twin = self.key.exchange(self._arrays[: self.lengths[0]], self._arrays[self.lengths[0] :], self._segments)
        for name in ("num_bytes", "gathers", "releases"):
            setattr(twin.record, name, getattr(self.record, name))
        twin.keeps = self.keeps
        (self._twins or [self])[-1].record.twin = address_of(twin.record)
        self._twins.append(twin)

    def parted(self) -> list[SharedSum]:
        """This exchange and its twins, which are none any more."""
        all_of_them, self._twins = [self, *self._twins], []
        for one in all_of_them:
            one.record.twin = 0
        return all_of_them

    def fail(self, error: Exception) -> None:
        """Each array that was to be written raises `error`: the engine forgets as soon as one of them is read."""
        fail(self._arrays[self.lengths[0] + 1 :], error)

    def ranks_missing(self) -> set[int]:
        """From whom something is still to come."""
        number = self.seen
        if self.record.state == C.AWAITING_ROW:
            return self.key.ranks_missing("last_read", number - self.key.depth)
        return self.key.ranks_missing("arrived", number) or self.key.ranks_summing(number)


provide("start_between_hosts", _start_between_hosts, ctypes.c_int64, ctypes.c_int64)
