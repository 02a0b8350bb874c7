"""Sums in Python, by MPI's operations: of what the C library does not sum, such as 2 bits per value or sparse rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...allreduce import sum_rows
from ...engine import push_async, view
from ...split import shard_bounds
from .compression import Half, TwoBits
from .operations import Operation, allreduce, bytes_of

if TYPE_CHECKING:
    from .agreement import Circle
    from .progress_engine import ProgressEngine
    from .store import MPI


class PythonSums:
    """Those of one store; each array is summed through memory of its own.

    Attributes:
        residuals: {key: (n,) array}: what 2 bits have left out, of keys that are not summed yet.
    """

    def __init__(self, store: MPI) -> None:
        self._store = store
        self._operations: dict = {}  # (name, form) -> what sums
        self._two_bits: dict[Hashable, CompressedSum] = {}  # key -> what sums its arrays in 2 bits
        self._residuals: dict[Hashable, np.ndarray] = {}

    def start(self, key: Hashable, values: Sequence[Any], outs: Sequence[Any], priority: int) -> None:
        """The arrays `outs` become the sum of all processes' `values`, on CPUs, when those are ready."""
        name, form = self._store._names("s", key, outs[0])
        summing = self._operations.get((name, form)) or self._open(name, form, key, outs[0])
        if isinstance(summing, CompressedSum) and summing.has_residual and key not in self._two_bits:
            self._two_bits[key] = summing
            if key in self._residuals:
                summing.set_residual(self._residuals.pop(key))

        def ready(done: Callable[..., None]) -> None:
            out, *copies = [view(array).reshape(-1) for array in outs]
            sources = [view(array).reshape(-1) for array in values]

            def end(error: Exception | None) -> None:
                if error is not None:  # nobody must train on with half a sum
                    out.fill(np.nan if out.dtype.kind == "f" else 0)
                else:
                    summing.read(out)
                for copy in copies:
                    np.copyto(copy, out)
                done(error)

            summing.operation.call(lambda: summing.fill(sources), end)

        written = [*outs, self._store._turn(name)]
        push_async(ready, read=values, write=written, name=f"gluon_parallel.mpi {key}", priority=priority)

    def _open(self, name: bytes, form: bytes, key: Hashable, array: Any) -> PlainSum:
        everyone, codec = self._store._progress.everyone, self._store._codec(key, array)
        own = np.empty(array.size, array.dtype)
        found = (
            PlainSum(everyone, name, form, own)
            if codec is None
            else CompressedSum(everyone, name, form, own, codec)
        )  # fmt: skip
        self._operations[name, form] = found
        return found

    def residuals(self) -> dict[Hashable, np.ndarray]:
        """{key: (n,) array}: what 2 bits have left out in this process, when nothing is under way."""
        return {key: summing.residual() for key, summing in self._two_bits.items()}

    def set_residuals(self, residuals: dict[Hashable, np.ndarray]) -> None:
        """Go on from these; keys without one begin anew."""
        self._residuals = dict(residuals)
        for key, summing in self._two_bits.items():
            summing.forget_residual()
            if key in self._residuals:
                summing.set_residual(self._residuals.pop(key))

    def forget_residuals(self) -> None:
        """Leave out what has been left out."""
        for summing in self._two_bits.values():
            summing.forget_residual()
        self._two_bits.clear()


SMALL = 64 * 1024  # bytes up to which the latency of an exchange counts, and not its bytes


class PlainSum:
    """Sum of an array that is filled from several, one of each device."""

    def __init__(self, circle: Circle, name: bytes, form: bytes, array: np.ndarray) -> None:
        self._array = array
        self.operation = allreduce(circle, name, form, array)

    def fill(self, sources: Sequence[np.ndarray]) -> None:
        """Add up what this process sends."""
        sum_rows(sources, [self._array])

    def read(self, out: np.ndarray) -> None:
        """Write the sum to `out`."""
        np.copyto(out, self._array)


class CompressedSum(PlainSum):
    """Sum of an array whose parts travel in fewer bits: each process adds up one part, and sends the result to all.

    Args:
        circle, name, form: as of :class:`Operation`.
        array: (n,) NumPy array, which holds what this process sends.
        codec: of :mod:`.compression`.
    """

    def __init__(self, circle: Circle, name: bytes, form: bytes, array: np.ndarray, codec: Half | TwoBits) -> None:
        self._array, mpi = array, circle.progress.mpi
        num, self._place = len(circle.ranks), circle.place
        self._codec, self._key = codec, (name, form)
        self._dtype = codec.dtype_of_sum(num, array.nbytes <= SMALL)
        self._parts = [slice(*shard_bounds(array.size, place, num)) for place in range(num)]
        lengths = [part.stop - part.start for part in self._parts]
        self._mine = lengths[self._place]
        outgoing, self._outgoing = _pieces(map(codec.num_bytes, lengths))
        incoming, self._incoming = _pieces([codec.num_bytes(self._mine)] * num)
        results, self._results = _pieces([length * self._dtype.itemsize for length in lengths])
        stages = [
            ("Alltoallv", ([*outgoing, mpi.BYTE], [*incoming, mpi.BYTE]), self._add_up),
            ("Allgatherv", (mpi.IN_PLACE, [*results, mpi.BYTE]), None),
        ]
        self.operation = Operation(circle, name, form, stages, outgoing[0].nbytes)

    def fill(self, sources: Sequence[np.ndarray]) -> None:
        super().fill(sources)
        self.encode()

    def encode(self) -> None:
        """Encode what the array holds."""
        for part, piece in zip(self._parts, self._outgoing):
            piece[:] = self._codec.encode(self._key_of(part), self._array[part])

    @property
    def has_residual(self) -> bool:
        """Whether what is left out of an array is added to the next one."""
        return isinstance(self._codec, TwoBits)

    def residual(self) -> np.ndarray:
        """(n,): what 2 bits have left out in this process."""
        return np.concatenate([self._residuals[self._key_of(part)] for part in self._parts])

    def set_residual(self, values: np.ndarray) -> None:
        """Add `values`, (n,), to the next array."""
        self._residuals.update((self._key_of(part), values[part]) for part in self._parts)

    def forget_residual(self) -> None:
        """Leave it out."""
        for part in self._parts:
            self._residuals.pop(self._key_of(part), None)

    @property
    def _residuals(self) -> dict:
        assert isinstance(self._codec, TwoBits)
        return self._codec.residuals

    def _key_of(self, part: slice) -> tuple:
        return self._key, part.start, part.stop

    def _add_up(self) -> None:
        with np.errstate(all="ignore"):  # an infinite gradient is the caller's to find
            rows = (self._codec.decode(piece, self._mine) for piece in self._incoming)
            sums = self._codec.encode_sum(functools.reduce(np.add, rows), self._dtype)
        self._results[self._place][:] = bytes_of(sums)

    def read(self, out: np.ndarray) -> None:
        for part, piece in zip(self._parts, self._results):
            out[part] = self._codec.decode_sum(piece.view(self._dtype), out.dtype)


def _pieces(sizes: Iterable[int]) -> tuple[tuple[np.ndarray, list[int], list[int]], list[np.ndarray]]:
    """(memory, sizes of its pieces in bytes, where they begin), and the pieces."""
    sizes = list(sizes)
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    memory = np.zeros(sum(sizes), np.uint8)
    return (memory, sizes, begins), [memory[begin : begin + size] for begin, size in zip(begins, sizes)]


def rows_of(array: Any) -> np.ndarray:
    """The rows of a row_sparse NDArray, by number; waits for them.

    Returns:
        (n,) NumPy records of a row's ``number`` and its ``values``.

    Example:
        >>> import mxnet as mx
        >>> array = mx.nd.array([[0, 0], [1, 2], [0, 0]]).tostype("row_sparse")
        >>> rows = rows_of(array)
        >>> rows["number"].tolist(), rows["values"].tolist()
        ([1], [[1.0, 2.0]])
    """
    rows = np.empty(array.indices.shape[0], [("number", np.int64), ("values", array.dtype, array.shape[1:])])
    rows["number"], rows["values"] = array.indices.asnumpy(), array.data.asnumpy()
    return rows


def add_up(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sum of arrays that have the rows `parts`: each row that one of them has, added in their order.

    Example:
        >>> import mxnet as mx
        >>> one, two = (rows_of(mx.nd.array(rows).tostype("row_sparse")) for rows in ([[0], [1]], [[2], [3]]))
        >>> add_up([one, two])["values"].tolist()
        [[2.0], [4.0]]
    """
    numbers = np.unique(np.concatenate([part["number"] for part in parts]))
    total = np.zeros(len(numbers), parts[0].dtype)
    total["number"] = numbers
    with np.errstate(all="ignore"):  # an infinite gradient is the caller's to find
        for part in parts:
            total["values"][np.searchsorted(numbers, part["number"])] += part["values"]
    return total


def gather_rows(progress: ProgressEngine, name: bytes, form: bytes, rows: np.ndarray) -> list[np.ndarray]:
    """The `rows` of every process, by rank; waits for all.

    Args:
        progress: the progress engine of these processes.
        name, form: as of :class:`.Operation`.
        rows: (n,) NumPy records; n may differ between processes, and be 0.
    """
    counts = progress.gather(name, b"number of rows of " + form, np.array([len(rows)], np.int64))[:, 0]
    ends = np.cumsum(counts)
    everything = np.empty(ends[-1], rows.dtype)
    sizes, begins = counts * rows.itemsize, (ends - counts) * rows.itemsize
    received = [everything.view(np.uint8), sizes.tolist(), begins.tolist(), progress.mpi.BYTE]
    stages = [("Allgatherv", ([rows.view(np.uint8), progress.mpi.BYTE], received), None)]
    progress.wait(Operation(progress.everyone, name, form, stages, rows.nbytes, once=True))
    return np.split(everything, ends[:-1])
