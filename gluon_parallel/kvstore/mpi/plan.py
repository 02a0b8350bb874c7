"""Plan of sums: buckets and how the store sums each, decided once; one call starts all sums of the C library."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from ...mxnet.compat import mx
from ...mxnet.compat.array_types import as_legacy, as_tuple
from ...mxnet.engine import failures, make_plain
from ...mxnet.library import check_call
from ...native import function
from ...native.records import address_of
from ..contract import Plan
from ..flight_recorder import RECORDER
from ..protocols import Arrays, Keys
from .shared_memory.sums import KeySums, SharedSum

_ALONE = 1 << 20  # bytes from which on an array travels by itself
_FIRST, _NEXT = 1 << 20, 25 << 20  # bytes of the first bucket, which starts early, and of those after it


class SumPlan(Plan):
    """A plan of the store ``mpi``; the next ``push`` makes it anew when the store has changed how it exchanges.

    Args:
        store: the store, whose ``settings`` are another object after a change.
        keys, values, outs, priorities: as of :meth:`.Contract.plan`.

    Raises:
        SparseUnsupported, ArrayMismatch: of these arrays.
    """

    def __init__(
        self,
        store: Any,
        keys: Keys,
        values: Sequence[Any],
        outs: Sequence[Any] | None = None,
        priorities: Sequence[int] | None = None,
    ) -> None:
        self.store = store
        self._keys, self._values = tuple(keys), list(map(as_tuple, values))
        self._outs = self._values if outs is None else list(map(as_tuple, outs))
        self._priorities = list(range(0, -len(keys), -1) if priorities is None else priorities)
        self._ids = list(map(id, itertools.chain(*self._values, *self._outs)))
        for key, ours, theirs in zip(self._keys, self._values, self._outs):
            check_arrays = store._check_alike if _are_rows(ours, theirs) else store._check
            check_arrays(key, [*ours, *theirs])
        self._settings: Any = None  # those for which it is made
        self.buckets: list[list[int]] = []  # numbers of the keys whose arrays travel together
        self._starts: list[Callable[[], Any]] = []

    def is_of(self, values: Arrays, outs: Arrays, priorities: Sequence[int]) -> bool:
        """Whether these are its arrays, which it keeps alive, and their priorities."""
        return self._ids == list(map(id, itertools.chain(*values, *outs))) and self._priorities == priorities

    def push(self) -> None:
        """Start all sums, as :meth:`.Plan.push`."""
        store = self.store
        if store._progress.failures:
            store._progress.check()
        if failures.kept:
            failures.check()
        if self._settings is not store.settings:
            self._starts = []  # whose exchanges can be used anew
            self._starts = self._make_starts()
            self._settings = store.settings
        for start in self._starts:
            start()

    def _make_starts(self) -> list[Callable[[], Any]]:
        """The functions that start the sums, in order: copies to the host, sums, copies back, and row_sparse sums."""
        store: Any = self.store
        pushed: list[tuple[SharedSum, int]] = []
        to_host: list[Callable[[], Any]] = []
        in_python, from_host, of_rows = to_host[:], to_host[:], to_host[:]
        self.buckets = self._assigned_buckets()
        for numbers in self.buckets:
            key, priority = self._keys[numbers[0]], self._priorities[min(numbers)]
            values, outs = self._values[numbers[0]], self._outs[numbers[0]]
            if _are_rows(values, outs):
                of_rows.append(functools.partial(store.sum_rows, key, values, outs))
                continue
            if len(numbers) > 1:
                values, outs = ([one for number in numbers for one in of[number]] for of in (self._values, self._outs))
                sums: KeySums | None = self._sums_of_bucket(numbers)
            else:
                if not are_on_host((*values, *outs)):  # copies are operators: they too begin when their array is ready
                    values, outs = (list(map(as_legacy, arrays)) for arrays in (values, outs))
                    on_host = [value.copyto(mx.cpu()) for value in values]
                    to_host += [functools.partial(value.copyto, copy) for value, copy in zip(values, on_host)]
                    from_host += [functools.partial(on_host[0].copyto, out) for out in outs]
                    values, outs = on_host, on_host[:1]
                sums = store.sums_natively(key, outs[0])
            make_plain(*values, *outs)
            if sums is None:
                in_python.append(functools.partial(store.sum_in_python, key, values, outs, priority))
            else:
                pushed.append((sums.exchange(values, outs), priority))
        pushes = [Pushes(store._progress.shared, *zip(*pushed)).push] if pushed else []
        return [*to_host, *pushes, *in_python, *from_host, *of_rows]

    def _assigned_buckets(self) -> list[list[int]]:
        """The numbers of the keys whose arrays travel together, from the last key on."""
        store, num = self.store, len(self._keys)
        if not store.uses_buckets or num == 1:
            return [[number] for number in range(num)]

        def kind(key: Hashable, values: Sequence[Any], outs: Sequence[Any]) -> tuple | None:
            is_alike = (
                not _are_rows(values, outs)
                and are_on_host((*values, *outs))
                and store.travels_with_others(key, outs[0])
            )
            return (np.dtype(outs[0].dtype).name, len(values), len(outs)) if is_alike else None

        kinds = list(map(kind, self._keys, self._values, self._outs))
        sizes = [0 if _are_rows(outs, outs) else outs[0].size * np.dtype(outs[0].dtype).itemsize for outs in self._outs]
        return assign_buckets(sizes, kinds)

    def _sums_of_bucket(self, numbers: Sequence[int]) -> KeySums:
        store, arrays = self.store, [self._outs[number][0] for number in numbers]
        signatures = [store._names("s", self._keys[number], self._outs[number][0])[1] for number in numbers]
        signature = b", ".join(f"key {self._keys[number]} ".encode() + one for number, one in zip(numbers, signatures))
        first, last = self._keys[numbers[0]], self._keys[numbers[-1]]
        labels = [RECORDER.kind_key_label(f"{store._number}s:{key}".encode())[2] for key in (first, last)]
        if all(labels):
            store.describe(f"{first} to {last}", " to ".join(labels))
        name, sizes = f"{store._number}s:{first} to {last}".encode(), [array.size for array in arrays]
        return store._progress.shared.rows_of(KeySums, name, signature, sizes, arrays[0].dtype)


class Pushes:
    """Exchanges of different keys that one call of the C library hands to MXNet's engine, step after step.

    Args:
        exchanges: they are released when this object is not used any more.
        priorities: of each.
    """

    def __init__(self, shared: Any, exchanges: Sequence[SharedSum], priorities: Sequence[int]) -> None:
        self._shared, self._exchanges = shared, exchanges
        self._addresses = np.array([address_of(exchange.record) for exchange in exchanges], np.int64)
        self._priorities = np.array(priorities, np.int64)
        self._arguments = address_of(shared.host), address_of(self._addresses), address_of(self._priorities)

    def push(self) -> None:
        """Start all of them, which begin when their arrays are ready; returns at once."""
        pushed, num = 0, len(self._exchanges)
        while pushed < num:
            pushed = _push(*self._arguments, pushed, num)
            check_call(-1 if pushed < 0 else 0)
            if pushed < num:
                self._exchanges[pushed].add_twin()
        progress = self._shared.progress
        if progress.failure is not None:  # since the caller looked
            for exchange in self._exchanges:
                exchange.fail(progress.failure)
        if not progress.is_watching:
            progress.watch()

    def __del__(self) -> None:
        for exchange in self._exchanges:
            exchange.key.release(exchange)


_push = function("gp_push", 5)


def _are_rows(values: Sequence[Any], outs: Sequence[Any]) -> bool:
    return all(array.stype == "row_sparse" for array in (*values, *outs))


def assign_buckets(
    sizes: Sequence[float],
    kinds: Sequence[Hashable],
    first: int = _FIRST,
    following: int = _NEXT,
    alone: int = _ALONE,
) -> list[list[int]]:
    """Which arrays travel together: lists of their numbers, from the last one on, as the backward pass finishes them.

    A list has arrays of one kind.

    Args:
        sizes: bytes of each array.
        kinds: of each, such as its dtype; None if it must travel by itself.
        first, following: the most bytes of the first list of a kind, and of the others.
        alone: bytes from which on an array has a list of its own.

    Example:
        >>> assign_buckets([8, 3, 3, 3, 3, 3], ["a", "a", "b", "a", "a", None], first=6, following=9, alone=8)
        [[5], [4, 3], [2], [1], [0]]
    """
    found: list = []
    rooms: dict = {}  # kind -> (its last list, how many bytes still fit)
    for number in reversed(range(len(sizes))):
        kind, size = kinds[number], sizes[number]
        if kind is None or size >= alone:
            found.append([number])
            continue
        members, room = rooms.get(kind, (None, 0))
        if size > room:
            room = first if members is None else following
            members = []
            found.append(members)
        members.append(number)
        rooms[kind] = members, room - size
    return found


def are_on_host(arrays: Sequence[Any]) -> bool:
    return all(array.ctx.device_type != "gpu" for array in arrays)
