"""The store ``mpi``: sums over this process's devices and over processes, while the backward pass goes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...allreduce import sum_rows
from ...compat import mx
from ...compat.array_types import BFLOAT16, to_device
from ...engine import make_plain, push, push_async, view
from ..base import Store
from ..flight_recorder import RECORDER
from ..handshake import form as form_of
from ..reserved_keys import FIRST_COUNT
from .buckets import plan, plan_by_times
from .compression import Half, TwoBits, compressor
from .operations import SMALL, CompressedSum, PlainSum, allgather, broadcast
from .parts import gather_parts
from .ready_times import ReadyTimes
from .reduction import Reduction
from .row_sparse import add_up, gather_rows, rows_of
from .startup import part_of, progress_engine

if TYPE_CHECKING:
    from .progress_engine import ProgressEngine
    from .shared_memory.gathers import SharedGather
    from .shared_memory.parts import SharedParts

_numbers = itertools.count()
_HALVES = {dtype: Half(dtype) for dtype in (np.dtype(np.float16), BFLOAT16)}  # arrays that travel as they are


class MPI(Store):
    """A store for ``gluon.Trainer`` that meets the other processes over MPI.

    Stores are made in the same order in every process. Keys are numbers or names; they meet by key, in whatever order
    the processes come to them. Every call returns at once; who reads the arrays waits. A failure is raised where an
    array of an exchange that it ended is waited for, and by every later call.

    Raises:
        StoreUnavailable: mpi4py or MPI is missing, or MPI does not see the processes that this one was started with.
        WorkerLost: a process does not open the store within ``GLUON_PARALLEL_TIMEOUT``, or 60, seconds.
        WorkersDiffer: other versions run elsewhere.
    """

    type = "mpi"
    has_groups = reduces = sums_rows = gathers_parts = True

    def __init__(self, progress: ProgressEngine | None = None, number: int | str | None = None) -> None:
        self._progress = progress_engine() if progress is None else progress
        self.rank, self.num_workers, self.ranks = self._progress.rank, self._progress.size, self._progress.ranks
        self._number = next(_numbers) if number is None else number  # the same in all its processes
        self._part_numbers = itertools.count()
        self._compressor: Half | TwoBits | None = None
        self._forms: dict = {}
        self._plans: dict = {}  # keys -> (their arrays, which travel together, what keeps them alive)
        self._ready: dict = {}  # keys -> when their arrays become ready
        self._operations: dict = {}  # (name, form) -> what sums in Python
        self._wide: dict = {}  # (name, form) -> a float32 array, of halves
        self._two_bits: dict[Hashable, CompressedSum] = {}  # key -> what sums its arrays in 2 bits
        self._residuals: dict[Hashable, np.ndarray] = {}  # of keys that are not summed yet
        self._turns: dict = {}  # name -> an array that all its exchanges in Python write, so that they keep their order
        self._reductions: dict = {}  # (key, length, direction) -> what combines statistics
        shared = self._progress.shared
        self.sums_together = shared is not None and shared.num_hosts > 1  # over one host it would only add copies
        self._known: dict = {}  # key -> its sums in shared memory, of keys that were summed there
        self._parts: set[SharedParts] = set()  # those that have summed or gathered parts

    def _broadcast(self, key: Hashable, value: Any, outs: Sequence[Any], priority: int) -> None:
        self._start("b", key, [value], outs, priority)

    def _sum(self, key: Hashable, values: Sequence[Any], outs: Sequence[Any], priority: int) -> None:
        known = self._known.get(key)
        if known is None or not known.push_again(values, outs, priority):
            if all(array.stype == "row_sparse" for array in (*values, *outs)):
                self._sum_rows(key, values, outs)
            else:
                self._start("s", key, values, outs, priority)

    def _sum_rows(self, key: Hashable, values: Sequence[Any], outs: Sequence[Any]) -> None:
        """Sum row_sparse arrays; waits, for only their values say how many rows there are."""
        self._progress.check()
        self._check_alike(key, [*values, *outs])
        name, form = f"{self._number}s:{key}".encode(), form_of(outs).encode()
        mine = add_up([rows_of(array) for array in values])
        total = add_up(gather_rows(self._progress, name, form, mine))
        arrays = total["values"], total["number"]
        result = mx.nd.sparse.row_sparse_array(arrays, shape=outs[0].shape, ctx=mx.cpu(), dtype=outs[0].dtype)
        for out in outs:
            result.copyto(out)

    def _sum_all(
        self, keys: Sequence[Hashable], values: Sequence[Sequence[Any]], outs: Sequence[Sequence[Any]], priority: int
    ) -> None:
        if not self.sums_together:
            super()._sum_all(keys, values, outs, priority)
            return
        self._progress.check()
        arrays = list(map(id, itertools.chain(*values, *outs)))
        if tuple(keys) not in self._ready:
            name = f"{self._number}s:ready times of {keys[0]} to {keys[-1]}".encode()
            self._ready[tuple(keys)] = ReadyTimes(self._progress.shared, name, len(keys))
        is_new = self._ready[tuple(keys)].call(values)
        known = self._plans.get(tuple(keys))
        if is_new or known is None or known[0] != arrays:
            for key, ours, theirs in zip(keys, values, outs):
                self._check(key, [*ours, *theirs])
            known = self._plans[tuple(keys)] = arrays, self._plan(keys, values, outs), [*values, *outs]
        for numbers, bucket in known[1]:
            if bucket is None:
                [number] = numbers
                self._sum(keys[number], values[number], outs[number], priority - number)
                continue
            read, written = ([one for number in numbers for one in arrays[number]] for arrays in (values, outs))
            if not bucket.push_again(read, written, priority - min(numbers)):
                make_plain(*read, *written)
                bucket.push(read, written, priority - min(numbers))

    def _plan(
        self, keys: Sequence[Hashable], values: Sequence[Sequence[Any]], outs: Sequence[Sequence[Any]]
    ) -> list[tuple[list[int], Any]]:
        """(numbers of keys, what sums their arrays together or None) for each bucket."""

        def kind(key: Hashable, ours: Sequence[Any], theirs: Sequence[Any]) -> tuple | None:
            on_host = all(array.ctx.device_type != "gpu" for array in (*ours, *theirs))
            is_alike = on_host and self._is_native(key, theirs[0]) and self._codec(key, theirs[0]) is None
            return (np.dtype(theirs[0].dtype).name, len(ours), len(theirs)) if is_alike else None

        kinds = list(map(kind, keys, values, outs))
        sizes = [out[0].size * np.dtype(out[0].dtype).itemsize for out in outs]
        times, found = self._ready[tuple(keys)].times, []
        for numbers in plan(sizes, kinds) if times is None else plan_by_times(sizes, kinds, times):
            bucket = None
            if len(numbers) > 1:
                forms = [self._names("s", keys[number], outs[number][0])[1] for number in numbers]
                names = [f"key {keys[number]} " for number in numbers]
                form = b", ".join(name.encode() + form for name, form in zip(names, forms))
                ends = keys[numbers[0]], keys[numbers[-1]]
                labels = [RECORDER.kind_key_label(f"{self._number}s:{key}".encode())[2] for key in ends]
                name = f"{self._number}s:{ends[0]} to {ends[1]}".encode()
                if all(labels):
                    self.describe(f"{ends[0]} to {ends[1]}", " to ".join(labels))
                bucket = self._progress.shared.sums(name, form, *(outs[number][0] for number in numbers))
            found.append((numbers, bucket))
        return found

    def prepare_gather(self, key: Hashable, length: int) -> None:
        """Nothing: a key is prepared when it is gathered."""

    def gather(self, key: Hashable, vector: np.ndarray, timeout: float | None = None) -> np.ndarray:
        """Every process's `vector`, by rank; waits for all, without an array or the engine.

        Args:
            key: a number or a name, used for nothing else.
            vector: (n,) NumPy array, of one length and dtype everywhere.

        Returns:
            (num_workers, n) NumPy array.
        """
        vector = np.ascontiguousarray(vector)
        shared = self.shared_gather(key, vector)
        if shared is not None:
            return shared.gather(vector)
        name, form = self._names("g", key, vector)
        return self._progress.gather(name, form, vector)

    _gather_numbers: Any = gather

    def allgather(self, key: Hashable, value: Any, out: Any, priority: int = 0) -> None:
        """Row r of `out` becomes the `value` of process r, when those are ready; returns at once.

        Args:
            key: a number or a name, used for nothing else.
            value: NDArray (...) on the CPU, of one shape and dtype everywhere.
            out: NDArray (num_workers, ...) on the CPU, of the same dtype.
            priority: a higher one starts earlier.
        """
        self._progress.check()
        make_plain(value, out)
        name, form = self._names("g", key, value)
        if (name, form) not in self._operations:
            rows = np.empty((self.num_workers, *value.shape), value.dtype)
            self._operations[name, form] = rows, allgather(self._progress.everyone, name, form, rows)
        rows, operation = self._operations[name, form]

        def ready(done: Callable[..., None]) -> None:
            own, result = view(value), view(out)

            def end(error: Exception | None) -> None:
                if error is None:
                    np.copyto(result, rows)
                done(error)

            operation.call(lambda: np.copyto(rows[self.rank], own), end)

        written = [out, self._turn(name)]
        push_async(ready, read=[value], write=written, name=f"gluon_parallel.mpi {key}", priority=priority)

    def shared_gather(self, key: Hashable, vector: np.ndarray) -> SharedGather | None:
        """Where :meth:`gather` goes through shared memory, for the C library; None if it does not."""
        shared = self._progress.shared
        if shared is None or shared.num_hosts > 1 or not shared.takes_vector(vector):
            return None
        return shared.gathers(*self._names("g", key, vector), vector)

    def reduce(self, key: Hashable, message: np.ndarray, direction: int) -> np.ndarray:
        """The messages of all processes combined: see :func:`.combine.combine`, with headers.

        Args:
            key: a number or a name, used for nothing else.
            message: (n,) float64, with a header.
            direction: 0 for moments, 1 for sums.
        """
        known = key, len(message), direction
        if known not in self._reductions:
            name, form = self._names("g", key, message)
            self._reductions[known] = Reduction(self._progress, name, form, len(message), direction)
        return self._reductions[known].reduce(message)

    def sum_parts(
        self,
        keys: Sequence[Hashable],
        arrays: Sequence[Sequence[Any]],
        bounds: Sequence[Sequence[int]],
        whole: bool = False,
    ) -> None:
        others = list(range(len(keys)))
        for parts, numbers, chosen in self._shared_parts(keys, arrays, bounds, gathers=False):
            parts.exchange(*chosen, gathers=False, releases=not whole)
            if whole:
                parts.exchange(*chosen, gathers=True)
            others = [number for number in others if number not in numbers]
        if others:  # MPI's Reduce_scatter would add up in another order than its Allreduce
            rest = [arrays[number] for number in others]
            self._sum_all([keys[number] for number in others], rest, rest, 0)

    def gather_parts(
        self, keys: Sequence[Hashable], arrays: Sequence[Sequence[Any]], bounds: Sequence[Sequence[int]]
    ) -> None:
        others = list(range(len(keys)))
        for parts, numbers, chosen in self._shared_parts(keys, arrays, bounds, gathers=True):
            parts.exchange(*chosen, gathers=True)
            others = [number for number in others if number not in numbers]
        sizes = [arrays[number][0].size * np.dtype(arrays[number][0].dtype).itemsize for number in others]
        kinds = [(np.dtype(arrays[number][0].dtype).name, len(arrays[number])) for number in others]
        for places in plan(sizes, kinds, range(len(others))):
            numbers = [others[place] for place in places]
            outs, ends = [arrays[number] for number in numbers], [bounds[number] for number in numbers]
            ours = [self._names("a", keys[number], arrays[number][0]) for number in numbers]
            last = f" to {keys[numbers[-1]]}" * (len(ours) > 1)
            name, form = ours[0][0] + last.encode(), b", ".join(form for _, form in ours)
            gather_parts(self._progress.everyone, name, form, outs, ends, self._operations, self._turn(name))

    def _shared_parts(
        self,
        keys: Sequence[Hashable],
        arrays: Sequence[Sequence[Any]],
        bounds: Sequence[Sequence[int]],
        gathers: bool,
    ) -> Iterator[tuple[SharedParts, Sequence[int], tuple[Sequence, Sequence]]]:
        """What exchanges arrays in the memory of the only host, the places of their keys, (arrays, bounds)."""
        self._progress.check()
        for parts in self._parts:
            if parts.knows(arrays, bounds, gathers):  # all of them, which need no second look
                yield parts, range(len(keys)), (arrays, bounds)
                return
        shared = self._progress.shared
        found: dict[str, list[int]] = {}
        for number, (key, outs) in enumerate(zip(keys, arrays)):
            self._check(key, outs)
            if shared is None or shared.num_hosts > 1 or not shared.takes(outs[0]):
                continue
            on_host = all(array.ctx.device_type != "gpu" for array in outs)
            if on_host and (gathers or not self._compresses(key, outs[0])):
                found.setdefault(np.dtype(outs[0].dtype).name, []).append(number)
        for dtype, numbers in found.items():
            assert shared is not None
            chosen = [arrays[one] for one in numbers], [bounds[one] for one in numbers]
            parts = shared.parts(f"{self._number}a:arrays of {dtype}".encode(), dtype)
            if not parts.knows(*chosen, gathers):  # the rows are those of all arrays: nothing else finds what differs
                self._compare_once([keys[one] for one in numbers], *chosen)
            self._parts.add(parts)
            yield parts, numbers, chosen

    def part(self, members: Sequence[int] | None) -> MPI | None:
        progress = part_of(self._progress, members)
        number = f"{self._number}.{next(self._part_numbers)}"
        RECORDER.members[number] = frozenset(() if progress is None else progress.ranks)
        return None if progress is None else MPI(progress, number)

    def take_part_in(self, progress: ProgressEngine) -> None:
        """Exchange through another progress engine from now on, after a loss; keys are agreed upon anew."""
        compressor = self._compressor
        if isinstance(compressor, TwoBits):
            compressor = TwoBits(compressor.threshold)  # its residuals have what the repeated step sends again
        self.__init__(progress, self._number)  # type: ignore[misc]
        self._compressor = compressor

    def check(self) -> None:
        """WorkerLost, WorkersDiffer: what has ended the exchanges of this process, if anything has."""
        self._progress.check()

    def set_gradient_compression(self, compression_params: Any) -> None:
        """Send gradients in fewer bits from now on; the same on every process.

        Args:
            compression_params: ``{"type": "fp16"}``, ``{"type": "bf16"}``, or MXNet's
                ``{"type": "2bit", "threshold": 0.5}``: what is below the threshold stays behind in a residual, and is
                sent when it has grown. Numbers of samples and of what else the processes count are never compressed,
                nor are row_sparse gradients.
        """
        self._compressor = compressor(compression_params)
        for summing in self._two_bits.values():
            summing.forget_residual()
        self._two_bits.clear()
        self._known.clear()
        self._parts.clear()
        self._plans.clear()
        self._forms.clear()

    def residuals(self) -> dict[Hashable, np.ndarray]:
        """{key: (n,) array}: what compression in 2 bits has left out in this process, when nothing is under way."""
        return {key: summing.residual() for key, summing in self._two_bits.items()}

    def set_residuals(self, residuals: dict[Hashable, np.ndarray]) -> None:
        """Go on from what :meth:`residuals` returned, here or in another process; keys without one begin anew."""
        self._residuals = dict(residuals)
        for key, summing in self._two_bits.items():
            summing.forget_residual()
            if key in self._residuals:
                summing.set_residual(self._residuals.pop(key))

    # ------------------------------------------------------------------

    def _names(self, kind: str, key: Hashable, array: Any) -> tuple[bytes, bytes]:
        known = self._forms.get((kind, key))
        if known is None or known[0] != (array.shape, array.dtype):
            note = self._compressor.note if self._compressor and kind == "s" and self._compresses(key, array) else ""
            form = f"{np.dtype(array.dtype).name} {tuple(array.shape)}{note}"
            known = (array.shape, array.dtype), f"{self._number}{kind}:{key}".encode(), form.encode()
            self._forms[kind, key] = known
        return known[1:]

    def _compresses(self, key: Hashable, array: Any) -> bool:
        """Whether that key's arrays are compressed. Counts travel as they are: rounded they would be others."""
        is_count = isinstance(key, int) and key >= FIRST_COUNT
        return self._compressor is not None and not is_count and self._compressor.takes(np.dtype(array.dtype))

    def _codec(self, key: Hashable, array: Any) -> Half | TwoBits | None:
        """What encodes that key's arrays on their way, or None."""
        codec = self._compressor if self._compresses(key, array) else _HALVES.get(np.dtype(array.dtype))
        # Small arrays cost latency, not bytes, and a host's sum may be too large for float16.
        is_small = isinstance(codec, Half) and 4 * array.size <= SMALL
        return None if is_small and self.sums_together else codec

    def _start(self, kind: str, key: Hashable, values: Sequence[Any], outs: Sequence[Any], priority: int) -> None:
        self._progress.check()
        self._check(key, [*values, *outs])
        if all(array.ctx.device_type != "gpu" for array in (*values, *outs)):
            self._start_on_host(kind, key, values, outs, priority)
            return
        # Through host memory; the copies are operators, so they too begin when their array is ready.
        staged = [to_device(value, mx.cpu()) for value in values]
        result = staged[0] if staged[0] is not values[0] else staged[0].copy()
        self._start_on_host(kind, key, staged, [result], priority)
        for out in outs:
            result.copyto(out)

    def _start_on_host(
        self, kind: str, key: Hashable, values: Sequence[Any], outs: Sequence[Any], priority: int
    ) -> None:
        if kind == "s" and self._start_native(key, values, outs, priority):
            return
        make_plain(*values, *outs)
        name, form = self._names(kind, key, outs[0])
        if kind == "s" and self.sums_together and np.dtype(outs[0].dtype) in _HALVES and outs[0].size:
            self._start_halves(name, form, key, values, outs, priority)
            return
        how = self._summing(name, form, key, outs[0]) if kind == "s" else None

        def ready(done: Callable[..., None]) -> None:
            out, *copies = [view(array).reshape(-1) for array in outs]
            sources = [view(array).reshape(-1) for array in values]

            def end(error: Exception | None) -> None:
                if error is not None:  # nobody must train on with half a sum
                    out.fill(np.nan if out.dtype.kind == "f" else 0)
                elif how is not None:
                    how.read(out)
                for copy in copies:
                    np.copyto(copy, out)
                done(error)

            if how is not None:
                how.operation.call(lambda: how.fill(sources), end)
            else:
                if sources[0].ctypes.data != out.ctypes.data:
                    np.copyto(out, sources[0])
                operation = broadcast(self._progress.everyone, name, form, out)
                operation.keeps = outs  # MPI may write to them until it has ended, even after an error here
                operation.call(lambda: None, end)

        written = [*outs, self._turn(name)]
        push_async(ready, read=values, write=written, name=f"gluon_parallel.mpi {key}", priority=priority)

    def _turn(self, name: bytes) -> Any:
        """The array that all exchanges of a name write."""
        if name not in self._turns:
            self._turns[name] = mx.nd.zeros(1, ctx=mx.cpu())
        return self._turns[name]

    def _start_halves(
        self, name: bytes, form: bytes, key: Hashable, values: Sequence[Any], outs: Sequence[Any], priority: int
    ) -> None:
        """As float32 within each host, and also between hosts if they are small."""
        if (name, form) not in self._wide:
            self._wide[name, form] = mx.nd.zeros(outs[0].size, ctx=mx.cpu())
        wide = self._wide[name, form]

        def widen() -> None:
            own = np.empty(wide.size, outs[0].dtype)  # rounded once, as where halves stay on GPUs
            sum_rows([view(array).reshape(-1) for array in values], [own])
            sum_rows([own], [view(wide)])

        def narrow(done: Callable[..., None]) -> None:
            sum_rows([view(wide)], [view(array).reshape(-1) for array in outs])
            done()

        title = f"gluon_parallel.mpi {key}"
        push(widen, values, [wide], mx.cpu(), title, priority)
        sums = self._progress.shared.sums(name, form, wide, codec=self._codec(key, outs[0]))
        sums.push([wide], [wide], priority)
        # Always: after an error it is not a number, and nobody must train on with what was there before.
        push_async(narrow, [wide], outs, mx.cpu(), title, priority, always=True)

    def _is_native(self, key: Hashable, array: Any) -> bool:
        shared = self._progress.shared
        if shared is None or not shared.takes(array):
            return False
        # 2 bits stay between all processes, as each has a residual, and sends the threshold or nothing.
        return not self._compresses(key, array) or (self.sums_together and isinstance(self._compressor, Half))

    def _start_native(self, key: Hashable, values: Sequence[Any], outs: Sequence[Any], priority: int) -> bool:
        """By the C library, if all processes have it and the arrays allow it."""
        if not self._is_native(key, outs[0]):
            return False
        found = self._progress.shared.sums(*self._names("s", key, outs[0]), outs[0], codec=self._codec(key, outs[0]))
        make_plain(*values, *outs)
        self._known[key] = found
        found.push(values, outs, priority)
        return True

    def _summing(self, name: bytes, form: bytes, key: Hashable, array: Any) -> PlainSum:
        """What sums arrays like this one in Python."""
        known = self._operations.get((name, form))
        if known is None:
            dtype, everyone = np.dtype(array.dtype), self._progress.everyone
            codec = self._codec(key, array)
            own = np.empty(array.size, dtype)
            known = self._operations[name, form] = (
                PlainSum(everyone, name, form, own)
                if codec is None
                else CompressedSum(everyone, name, form, own, codec)
            )
        if isinstance(known, CompressedSum) and known.has_residual and key not in self._two_bits:
            self._two_bits[key] = known
            if key in self._residuals:
                known.set_residual(self._residuals.pop(key))
        return known
