"""Plan of sums: how the store sums each key's arrays, decided once; one call starts all sums of the C library."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...compat import mx
from ...compat.array_types import as_legacy, as_tuple
from ...engine import failures, make_plain, push, view
from ..contract import Arrays, Keys, Plan
from ..flight_recorder import RECORDER
from .buckets import plan, plan_by_times
from .shared_memory.sums import KeySums, Pushes, SharedSum

if TYPE_CHECKING:
    from .shared_memory.memory import SharedMemory
    from .store import MPI


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
        store: MPI,
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
        self._times: ReadyTimes | None = None
        self.buckets: list[list[int]] = []  # numbers of the keys whose arrays travel together
        self._starts: list[Callable[[], Any]] = []

    def is_of(self, values: Arrays, outs: Arrays, priorities: Sequence[int]) -> bool:
        """Whether these are its arrays, which it keeps alive, and their priorities."""
        return self._ids == list(map(id, itertools.chain(*values, *outs))) and self._priorities == priorities

    def push(self) -> None:
        store = self.store
        if store._progress.failures:
            store._progress.check()
        if failures.kept:
            failures.check()
        is_new = self._settings is not store.settings
        if is_new:
            self._times = self._times_of_store()
        if (self._times is not None and self._times.call(self._values)) or is_new:
            self._starts = []  # whose exchanges can be used anew
            self._starts = self._made()
            self._settings = store.settings
        for start in self._starts:
            start()

    def _times_of_store(self) -> ReadyTimes | None:
        """When the arrays of these keys become ready; None where they do not travel together."""
        store, keys = self.store, self._keys
        if not store.sums_together or len(keys) == 1:
            return None
        if keys not in store.ready_times:
            name = f"{store._number}s:ready times of {keys[0]} to {keys[-1]}".encode()
            store.ready_times[keys] = ReadyTimes(store._progress.shared, name, len(keys))
        return store.ready_times[keys]

    def _made(self) -> list[Callable[[], Any]]:
        """What starts the sums: copies to the host, sums, copies from there; those that are waited for come last."""
        store: MPI = self.store
        pushed: list[tuple[SharedSum, int]] = []
        to_host: list[Callable[[], Any]] = []
        in_python, from_host, of_rows = to_host[:], to_host[:], to_host[:]
        self.buckets = self._planned_buckets()
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
                if not _are_on_host(values, outs):  # copies are operators: they too begin when their array is ready
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

    def _planned_buckets(self) -> list[list[int]]:
        """The numbers of the keys whose arrays travel together; from the last key on, where nothing else is known."""
        store, num = self.store, len(self._keys)
        if not store.sums_together or num == 1:
            return [[number] for number in range(num)]

        def kind(key: Hashable, values: Sequence[Any], outs: Sequence[Any]) -> tuple | None:
            is_alike = (
                not _are_rows(values, outs) and _are_on_host(values, outs) and store.travels_with_others(key, outs[0])
            )
            return (np.dtype(outs[0].dtype).name, len(values), len(outs)) if is_alike else None

        kinds = list(map(kind, self._keys, self._values, self._outs))
        sizes = [0 if _are_rows(outs, outs) else outs[0].size * np.dtype(outs[0].dtype).itemsize for outs in self._outs]
        times = None if self._times is None else self._times.times
        return plan(sizes, kinds) if times is None else plan_by_times(sizes, kinds, times)

    def _sums_of_bucket(self, numbers: Sequence[int]) -> KeySums:
        store, arrays = self.store, [self._outs[number][0] for number in numbers]
        signatures = [store._names("s", self._keys[number], self._outs[number][0])[1] for number in numbers]
        signature = b", ".join(f"key {self._keys[number]} ".encode() + one for number, one in zip(numbers, signatures))
        first, last = self._keys[numbers[0]], self._keys[numbers[-1]]
        labels = [RECORDER.kind_key_label(f"{store._number}s:{key}".encode())[2] for key in (first, last)]
        if all(labels):
            store.describe(f"{first} to {last}", " to ".join(labels))
        return store._progress.shared.sums(f"{store._number}s:{first} to {last}".encode(), signature, *arrays)


def _are_rows(values: Sequence[Any], outs: Sequence[Any]) -> bool:
    return all(array.stype == "row_sparse" for array in (*values, *outs))


def _are_on_host(values: Sequence[Any], outs: Sequence[Any]) -> bool:
    return all(array.ctx.device_type != "gpu" for array in (*values, *outs))


_MEASURED = 2  # the call in which times are measured; in the first one, the step allocates its memory and more
_FIRST_OF_ALL = 1 << 30  # priority of what notes the time


class ReadyTimes:
    """Measures at the second call when its arrays become ready, and knows that on all processes from the third one on.

    All processes come to the calls in one order, so they know the times at the same call; the sums have the same bits.
    A process without samples adds times that hardly differ, and so leaves the order to the others.

    Args:
        shared, name: memory through which the times are added up, under that name.
        num: of keys.
    """

    def __init__(self, shared: SharedMemory, name: bytes, num: int) -> None:
        self.times: Any = None  # (num,) seconds, or None if they are not known yet
        self._shared, self._name, self._num = shared, name, num
        self._calls = 0
        self._total: Any = None

    def call(self, values: Arrays) -> bool:
        """Take note of a call with these arrays of each key; whether the times are known from this one on."""
        if self.times is not None:
            return False
        if self._total is not None:
            self.times = self._total.asnumpy()  # of the last step; what this one computes has been launched
            return True
        self._calls += 1
        if self._calls == _MEASURED:
            self._measure(values)
        return False

    def _measure(self, values: Arrays) -> None:
        device, mine = mx.cpu(0), np.zeros(self._num)
        marks = [mx.nd.zeros(1, ctx=device) for _ in values]

        def note(number: int) -> None:
            mine[number] = time.monotonic()

        def hand_over() -> None:
            np.copyto(view(total), mine - mine.min())

        for number in reversed(range(self._num)):  # so arrays that are ready before this leave the order as it was
            noted = functools.partial(note, number)
            push(noted, values[number], [marks[number]], device, "gluon_parallel.ready", _FIRST_OF_ALL)
        total = mx.nd.zeros(self._num, ctx=device, dtype="float64")
        push(hand_over, marks, [total], device, "gluon_parallel.ready")
        signature = f"float64 ({self._num},)".encode()
        exchange = self._shared.sums(self._name, signature, total).exchange([total], [total])
        Pushes(self._shared, [exchange], [0]).push()
        self._total = total
