"""The store ``mpi``: sums over this process's devices and over processes, while the backward pass goes on."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...mxnet.compat import mx
from ...mxnet.compat.array_types import as_legacy
from ...mxnet.engine import make_plain, push_async, view
from ..base import Store
from ..flight_recorder import RECORDER
from ..handshake import signature as signature_of
from ..protocols import Arrays, Bounds, Keys
from ..reserved_keys import FIRST_COUNT
from .operations import Operation, bytes_of
from .plan import SumPlan, are_on_host
from .python_sums import (
    CODECS,
    SMALL,
    CompressedSum,
    Compression,
    Half,
    PlainSum,
    TwoBits,
    add_up,
    compressor,
    gather_rows,
    rows_of,
)  # fmt: skip
from .regrouping import regroup
from .shared_memory.rows import Reduction, SharedGather
from .shared_memory.shards import exchange_in_shared_memory
from .shared_memory.sums import KeySums
from .startup import progress_engine, subgroup_of

if TYPE_CHECKING:
    from .progress_engine import ProgressEngine
    from .shared_memory.shards import SharedShards

_numbers = itertools.count()


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

    _ending: weakref.finalize | None = None  # frees its shared memory for others when the store is collected

    type = "mpi"

    def __init__(self, progress: ProgressEngine | None = None, number: int | str | None = None) -> None:
        self._progress = progress_engine() if progress is None else progress
        self.rank, self.num_workers, self.ranks = self._progress.rank, self._progress.size, self._progress.ranks
        self._number = next(_numbers) if number is None else number  # the same in all its processes
        self._subgroup_numbers = itertools.count()
        # What plans are made for: another object once arrays are exchanged otherwise, and within `summing_for`.
        self.settings = Compression()
        self._of_trainers: weakref.WeakKeyDictionary[Any, Compression] = weakref.WeakKeyDictionary()
        self._plans: dict = {}  # key, or keys of a list -> the plan of its arrays of the last time
        self._signatures: dict = {}
        self._operations: dict = {}  # (name, signature, ...) -> what carries out that exchange in Python
        self._order_arrays: dict = {}  # name -> what its exchanges in Python all write, so in order
        self.shared_shards: set[SharedShards] = set()  # those that have summed or gathered shards
        shared = self._progress.shared
        if self._ending is not None:  # made for another progress engine
            self._ending.detach()
        if shared is not None:
            self._ending = weakref.finalize(self, shared.ended.append, (self._number, None))
            self._ending.atexit = False
        self.uses_buckets = shared is not None and shared.num_hosts > 1  # over one host it would only add copies

    @property
    def library(self) -> str:
        shared, said = self._progress.shared, self._progress.mpi.Get_library_version().partition(",")[0].strip()
        one_host = shared is not None and shared.num_hosts == 1
        return f"{said}, {'sums in shared memory' if one_host else 'sums between hosts'}"

    def end_exchanges(self) -> None:
        for one in self._progress.progress_engines:
            one.wait_for_end()

    def regroup(self) -> list[int]:
        return regroup(self)

    def plan(self, *arguments: Any, **options: Any) -> SumPlan:
        return SumPlan(self, *arguments, **options)

    def _sum(self, key: Hashable, values: Sequence[Any], outs: Sequence[Any], priority: int) -> None:
        self._push_plan(key, (key,), (values,), (outs,), [priority])

    def _sum_all(self, keys: Keys, values: Arrays, outs: Arrays, priority: int) -> None:
        self._push_plan(tuple(keys), keys, values, outs, list(range(priority, priority - len(keys), -1)))

    def _push_plan(self, name: Hashable, keys: Sequence, values: Sequence, outs: Sequence, priorities: list) -> None:
        """Push the plan of these arrays, which is that of the last time as long as they stay the same."""
        plan = self._plans.get(name)
        if plan is None or not plan.is_of(values, outs, priorities):
            plan = SumPlan(self, keys, values, outs, priorities)
            self._plans[name] = plan
        plan.push()

    def sums_natively(self, key: Hashable, array: Any) -> KeySums | None:
        """What sums that key's arrays in the C library, if all processes have it and it takes arrays like this one."""
        shared = self._progress.shared
        if shared is None or not shared.takes(array):
            return None
        # 2 bits stay between all processes, as each has a residual, and sends the threshold or nothing.
        if self._compresses(key, array) and not (self.uses_buckets and isinstance(self.settings.compressor, Half)):
            return None
        codec = self._codec(key, array) if self.uses_buckets else None
        kind = functools.partial(KeySums, codec=codec)
        return shared.rows_of(kind, *self._names("s", key, array), [array.size], array.dtype)

    def travels_with_others(self, key: Hashable, array: Any) -> bool:
        """Whether that key's arrays may travel together with others between hosts."""
        shared = self._progress.shared
        return shared is not None and shared.takes(array) and self._codec(key, array) is None

    def sum_rows(self, key: Hashable, values: Sequence[Any], outs: Sequence[Any]) -> None:
        """Sum row_sparse arrays; waits, for only their values say how many rows there are."""
        name, signature = f"{self._number}s:{key}".encode(), signature_of(outs).encode()
        mine = add_up([rows_of(array) for array in values])
        total = add_up(gather_rows(self._progress, name, signature, mine))
        arrays = total["values"], total["number"]
        result = mx.nd.sparse.row_sparse_array(arrays, shape=outs[0].shape, ctx=mx.cpu(), dtype=outs[0].dtype)
        for out in outs:
            result.copyto(out)

    def _broadcast(self, key: Hashable, value: Any, outs: Sequence[Any], priority: int) -> None:
        self._progress.check()
        self._check(key, [value, *outs])
        name, signature = self._names("b", key, outs[0])

        def on(sources: list[np.ndarray], out: np.ndarray) -> tuple:
            if sources[0].ctypes.data != out.ctypes.data:
                np.copyto(out, sources[0])
            stages = [("Bcast", ([bytes_of(out), self._progress.mpi.BYTE], 0), None)]
            operation = Operation(self._progress.everyone, name, signature, stages, out.nbytes, once=True)
            return operation, _nothing, _nothing

        self._start(key, name, [value], outs, on, priority)

    def sum_in_python(self, key: Hashable, values: Sequence[Any], outs: Sequence[Any], priority: int) -> None:
        """The arrays `outs` become the sum of all processes' `values`, on CPUs: what the C library does not sum."""
        name, signature = self._names("s", key, outs[0])
        summing = self._operations.get((name, signature))
        if summing is None:
            summing = self._operations[name, signature] = self._python_sum(key, name, signature, outs[0])
        residual: Any = None
        if isinstance(self._codec(key, outs[0]), TwoBits):
            residual = self.settings.residual(key, outs[0].size, np.dtype(outs[0].dtype))

        def on(sources: list[np.ndarray], out: np.ndarray) -> tuple:
            def fill() -> None:  # one trainer's sum after the other's: `_start` keeps them in order
                if residual is not None:
                    summing.residual = residual
                summing.fill(sources)

            return summing.operation, fill, lambda: summing.read(out)

        self._start(key, name, values, outs, on, priority)

    def _python_sum(self, key: Hashable, name: bytes, signature: bytes, array: Any) -> PlainSum:
        everyone, codec, own = self._progress.everyone, self._codec(key, array), np.empty(array.size, array.dtype)
        if codec is None:
            return PlainSum(everyone, name, signature, own)
        return CompressedSum(everyone, name, signature, own, codec)

    def _start(
        self, key: Hashable, name: bytes, values: Sequence[Any], outs: Sequence[Any], on: Callable, priority: int
    ) -> None:
        """When the arrays are ready, carry out an operation that leaves its result in the first of `outs`.

        ``on(sources, out)``, of the arrays' memory, returns the operation, and what to call before and after it. What
        is on a GPU goes through host memory.
        """
        if not are_on_host((*values, *outs)):
            sources = [as_legacy(value).copyto(mx.cpu()) for value in values]
            result = as_legacy(outs[0]).copyto(mx.cpu())
            self._start(key, name, sources, [result], on, priority)
            for out in outs:
                result.copyto(as_legacy(out))
            return
        make_plain(*values, *outs)

        def ready(done: Callable[..., None]) -> None:
            out, *copies = [view(array).reshape(-1) for array in outs]
            operation, before, after = on([view(array).reshape(-1) for array in values], out)
            operation.keeps = outs  # MPI may write to them until it has ended, even after an error here

            def end(error: Exception | None) -> None:
                if error is None:
                    after()
                    operation.keeps = None
                else:  # nobody must train on with half of the values
                    out.fill(np.nan if out.dtype.kind == "f" else 0)
                for copy in copies:
                    np.copyto(copy, out)
                done(error)

            operation.call(before, end)

        if name not in self._order_arrays:
            self._order_arrays[name] = mx.nd.zeros(1, ctx=mx.cpu())
        written = [*outs, self._order_arrays[name]]
        push_async(ready, read=values, write=written, name=f"gluon_parallel.mpi {key}", priority=priority)

    def gather(self, key: Hashable, vector: np.ndarray) -> np.ndarray:
        """As of :class:`.Vectors`, without an array or the engine; of one length and dtype everywhere."""
        vector = np.ascontiguousarray(vector)
        shared = self.shared_gather(key, vector)
        if shared is not None:
            return shared.gather(vector)
        name, signature = self._names("g", key, vector)
        return self._progress.gather(name, signature, vector)

    def broadcast_bytes(self, key: Hashable, data: np.ndarray, rank: int) -> None:
        self._progress.broadcast(f"{self._number}o:{key}".encode(), b"bytes", data, rank)

    def allgather(self, key: Hashable, value: Any, out: Any, priority: int = 0) -> None:
        """As of :class:`.Hooks`, when the values are ready; returns at once. Of one shape and dtype everywhere."""
        self._progress.check()
        bounds = [rank * value.size for rank in range(self.num_workers + 1)]
        self._gather_by_mpi("g", key, [value], [out], bounds, priority)

    def end_of_gather(self, key: Hashable) -> Callable[[], object]:
        shared = self._progress.shared
        return _nothing if shared is None else functools.partial(shared.ended.append, (self._number, key))

    def shared_gather(self, key: Hashable, vector: np.ndarray) -> SharedGather | None:
        shared = self._progress.shared
        if shared is None or shared.num_hosts > 1 or not shared.takes_vector(vector):
            return None
        return shared.rows_of(SharedGather, *self._names("g", key, vector), vector.shape, vector.dtype)

    def reduce(self, key: Hashable, message: np.ndarray, direction: int) -> np.ndarray:
        name, signature = self._names("g", key, message)
        what = name, signature, len(message), direction
        if what not in self._operations:
            self._operations[what] = Reduction(self._progress, *what)
        return self._operations[what].reduce(message)

    def reduce_scatter(self, keys: Keys, arrays: Arrays, bounds: Bounds) -> None:
        others = exchange_in_shared_memory(self, keys, arrays, bounds, gathers=False)
        if others:  # MPI's Reduce_scatter would add up in another order than its Allreduce
            rest = [arrays[number] for number in others]
            self._sum_all([keys[number] for number in others], rest, rest, 0)

    def gather_shards(self, keys: Keys, arrays: Arrays, bounds: Bounds) -> None:
        for number in exchange_in_shared_memory(self, keys, arrays, bounds, gathers=True):
            self._gather_by_mpi("a", keys[number], (), arrays[number], bounds[number], 0)

    def _gather_by_mpi(
        self, kind: str, key: Hashable, own: Sequence[Any], outs: Sequence[Any], bounds: Sequence[int], priority: int
    ) -> None:
        """Each process's shard of the first of `outs`, which is the array `own` if that is given, goes to all."""
        name, signature = self._names(kind, key, outs[0])
        ends = [end * np.dtype(outs[0].dtype).itemsize for end in bounds]
        sizes = np.diff(ends).tolist()
        signature += f" in parts of {sizes} bytes".encode()

        def on(sources: list[np.ndarray], out: np.ndarray) -> tuple:
            for source in sources:
                out[bounds[self.rank] : bounds[self.rank + 1]] = source
            mpi = self._progress.mpi
            stages = [("Allgatherv", (mpi.IN_PLACE, [bytes_of(out), sizes, ends[:-1], mpi.BYTE]), None)]
            operation = Operation(self._progress.everyone, name, signature, stages, sizes[self.rank], once=True)
            return operation, _nothing, _nothing

        self._start(key, name, own, outs, on, priority)

    def subgroup(self, members: Sequence[int] | None) -> MPI | None:
        progress = subgroup_of(self._progress, members)
        number = f"{self._number}.{next(self._subgroup_numbers)}"
        RECORDER.members[number] = frozenset(() if progress is None else progress.ranks)
        return None if progress is None else MPI(progress, number)

    def take_part_in(self, progress: ProgressEngine) -> None:
        """Exchange through another progress engine from now on, with fewer or more; keys are agreed upon anew."""
        own, of_trainers = self.settings, self._of_trainers
        self.__init__(progress, self._number)  # type: ignore[misc]
        self.settings = Compression(own.compressor)
        for trainer, compression in of_trainers.items():
            self._of_trainers[trainer] = Compression(compression.compressor)

    def check(self) -> None:
        self._progress.check()

    def set_gradient_compression(self, compression_params: Any, trainer: Any = None) -> None:
        """Send gradients in fewer bits from now on; the same on every process.

        Args:
            compression_params: ``{"type": "fp16"}``, ``{"type": "bf16"}``, or MXNet's
                ``{"type": "2bit", "threshold": 0.5}``: what is below the threshold stays behind in a residual, and is
                sent when it has grown. Numbers of samples and of what else the processes count are never compressed,
                nor are row_sparse gradients.
            trainer: only what is summed within :meth:`summing_for` it; by default all that no trainer has asked for.
        """
        made = Compression(compressor(compression_params), self._compression_of(trainer).restored)
        if trainer is None:
            self.settings = made
        else:
            self._of_trainers[trainer] = made
        self.shared_shards.clear()

    @contextlib.contextmanager
    def summing_for(self, trainer: Any) -> Iterator[None]:
        before, self.settings = self.settings, self._compression_of(trainer)
        try:
            yield
        finally:
            self.settings = before

    def residuals(self, trainer: Any) -> dict[Hashable, np.ndarray]:
        compression = self._compression_of(trainer)
        return dict(compression.residuals) if isinstance(compression.compressor, TwoBits) else {}

    def set_residuals(self, residuals: dict[Hashable, np.ndarray], trainer: Any) -> None:
        self._compression_of(trainer).restore(residuals)

    def _compression_of(self, trainer: Any) -> Compression:
        return self.settings if trainer is None else self._of_trainers.get(trainer, self.settings)

    # ------------------------------------------------------------------

    def _names(self, kind: str, key: Hashable, array: Any) -> tuple[bytes, bytes]:
        known, compressor = self._signatures.get((kind, key)), self.settings.compressor
        if known is None or known[0] != (array.shape, array.dtype, compressor):
            note = compressor.note if compressor and kind == "s" and self._compresses(key, array) else ""
            signature = f"{np.dtype(array.dtype).name} {tuple(array.shape)}{note}"
            known = (array.shape, array.dtype, compressor), f"{self._number}{kind}:{key}".encode(), signature.encode()
            self._signatures[kind, key] = known
        return known[1:]

    def _compresses(self, key: Hashable, array: Any) -> bool:
        """Whether that key's arrays are compressed. Counts travel as they are: rounded they would be others."""
        is_count, compressor = isinstance(key, int) and key >= FIRST_COUNT, self.settings.compressor
        return compressor is not None and not is_count and compressor.takes(np.dtype(array.dtype))

    def _codec(self, key: Hashable, array: Any) -> Half | TwoBits | None:
        """What encodes that key's arrays on their way, or None."""
        codec = self.settings.compressor if self._compresses(key, array) else CODECS.get(np.dtype(array.dtype))
        # Small arrays cost latency, not bytes, and a host's sum may be too large for float16.
        is_small = isinstance(codec, Half) and 4 * array.size <= SMALL
        return None if is_small and self.uses_buckets else codec


def _nothing() -> None:
    """Before or after an operation that works on the arrays themselves."""
