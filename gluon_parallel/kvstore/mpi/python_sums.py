"""Sums that the C library does not do: of arrays of other dtypes, of compressed arrays, and of sparse rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...allreduce import sum_rows
from ...mxnet.compat.array_types import BFLOAT16, narrowed, widened
from ...split import shard_bounds
from .operations import Operation, allreduce, bytes_of

if TYPE_CHECKING:
    from .agreement import ProcessGroup
    from .progress_engine import ProgressEngine


SMALL = 64 * 1024  # bytes up to which the latency of an exchange counts, and not its bytes


class Half:
    """As float16 or bfloat16; added in float32, and the sum rounded once more."""

    scale = 1.0  # of what is added

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype
        self.note = " as bfloat16" if dtype == BFLOAT16 else " as float16"  # what the processes compare

    def takes(self, dtype: np.dtype) -> bool:
        """Whether arrays of that NumPy dtype are compressed; others travel as they are."""
        return dtype.kind == "f" and dtype.itemsize > 2

    def num_bytes(self, num: int) -> int:
        """Of so many values."""
        return num * self._dtype.itemsize

    def dtype_of_sum(self, num_processes: int, small: bool) -> np.dtype:
        """As what the sum of arrays over so many processes travels; that of small ones is not rounded."""
        return np.dtype(np.float32) if small else self._dtype

    def encode(self, vector: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """The bytes to send for `vector`, a 1-D NumPy array; only :class:`TwoBits` uses `residual`."""
        same = vector.dtype == self._dtype
        return (vector if same else narrowed(vector.astype(np.float32), self._dtype)).view(np.uint8)

    def decode(self, piece: np.ndarray, num: int) -> np.ndarray:
        """What has travelled, so many values, as it is added."""
        return widened(piece.view(self._dtype))


CODECS = {dtype: Half(dtype) for dtype in (np.dtype(np.float16), BFLOAT16)}


class TwoBits:
    """As -threshold, 0 or +threshold; what was left out stays in a residual and is added next time. MXNet's semantics.

    The sum over up to 127 processes takes 8 bits per value, over more of them 16.

    Example:
        >>> two = TwoBits(0.5)
        >>> gradient, residual = np.array([0.7, 0.3, -2.0], np.float32), np.zeros(3, np.float32)
        >>> [(0.5 * two.decode(two.encode(gradient, residual), 3)).tolist() for _ in range(3)]
        [[0.5, 0.0, -0.5], [0.5, 0.5, -0.5], [0.5, 0.0, -0.5]]
    """

    def __init__(self, threshold: float) -> None:
        self.scale = threshold
        self.note = f" in 2 bits of {threshold:g}"

    def takes(self, dtype: np.dtype) -> bool:
        return dtype.kind == "f"

    def num_bytes(self, num: int) -> int:
        return (2 * num + 7) // 8

    def dtype_of_sum(self, num_processes: int, small: bool) -> np.dtype:
        return np.dtype(np.int8 if num_processes < 128 else np.int16)

    def encode(self, vector: np.ndarray, residual: np.ndarray) -> np.ndarray:
        residual += widened(vector) if vector.dtype == BFLOAT16 else vector
        up, down = residual >= self.scale, residual <= -self.scale
        residual -= self.scale * (up.astype(residual.dtype) - down.astype(residual.dtype))
        return np.packbits(np.concatenate([up, down]))

    def decode(self, piece: np.ndarray, num: int) -> np.ndarray:
        up, down = np.unpackbits(piece)[: 2 * num].reshape(2, num).astype(np.int16)
        return up - down


def compressor(parameters: Any) -> Half | TwoBits | None:
    """What compresses after MXNet's ``compression_params``, or None.

    Raises:
        ValueError: it has an unknown type, or a threshold that is not positive.
    """
    parameters = dict(parameters)
    kind = parameters.pop("type", None)
    if kind == "2bit":
        threshold = float(parameters.pop("threshold", 0.5))
        if threshold > 0 and not parameters:
            return TwoBits(threshold)
    elif kind in ("none", "fp16", "bf16") and not parameters:
        return {"fp16": CODECS[np.dtype(np.float16)], "bf16": CODECS[BFLOAT16]}.get(kind)
    raise ValueError(
        f"compression_params: cannot use type {kind!r} with {parameters}; expected {{'type': 'fp16'}}, "
        "{'type': 'bf16'} or {'type': '2bit', 'threshold': a positive number}"
    )


class Compression:
    """How gradients travel in fewer bits, those of one trainer or of all that did not ask for another; None: as is.

    Attributes:
        compressor: what encodes arrays, or None.
        residuals: key -> (n,): what 2 bits have left out in this process.
        restored: the same, of keys that have not been summed yet.
    """

    def __init__(self, compressor: Half | TwoBits | None = None, restored: dict | None = None) -> None:
        self.compressor, self.residuals, self.restored = compressor, dict[Any, np.ndarray](), dict(restored or {})

    def residual(self, key: Any, size: int, dtype: np.dtype) -> np.ndarray:
        """What was left out of an array of this size under that key, to be written in place."""
        known = self.residuals.get(key)
        if known is None or known.size != size:
            known = self.residuals[key] = np.zeros(size, np.float32 if dtype == BFLOAT16 else dtype)
            known += self.restored.pop(key, 0)
        return known

    def restore(self, residuals: dict) -> None:
        """Go on from these residuals; keys without one begin anew."""
        self.restored = dict(residuals)
        for key, residual in self.residuals.items():
            residual[:] = self.restored.pop(key, 0)


class PlainSum:
    """Sum of an array that is filled from several, one of each device."""

    residual: Any = None  # of a sum in 2 bits

    def __init__(self, group: ProcessGroup, name: bytes, signature: bytes, array: np.ndarray) -> None:
        self._array = array
        self.operation = allreduce(group, name, signature, array)

    def fill(self, sources: Sequence[np.ndarray]) -> None:
        """Add up what this process sends."""
        sum_rows(sources, [self._array])

    def read(self, out: np.ndarray) -> None:
        """Write the sum to `out`."""
        np.copyto(out, self._array)


class CompressedSum(PlainSum):
    """Sum of an array whose shards travel in fewer bits: each process adds up one, and sends the result to all.

    Args:
        group, name, signature: as of :class:`Operation`.
        array: (n,) NumPy array, which holds what this process sends.
        codec: a :class:`Half` or :class:`TwoBits`.

    Attributes:
        residual: (n,): what a codec of 2 bits leaves out, and adds to the next array; it is set before each sum.
    """

    def __init__(
        self,
        group: ProcessGroup,
        name: bytes,
        signature: bytes,
        array: np.ndarray,
        codec: Half | TwoBits,
    ) -> None:
        self._array, self._codec, self.residual = array, codec, array
        mpi, num, self._rank = group.progress.mpi, len(group.ranks), group.rank
        self._dtype = codec.dtype_of_sum(num, array.nbytes <= SMALL)
        self._shards = [slice(*shard_bounds(array.size, rank, num)) for rank in range(num)]
        lengths = [shard.stop - shard.start for shard in self._shards]
        self._mine = lengths[self._rank]
        outgoing, self._outgoing = _pieces(map(codec.num_bytes, lengths))
        incoming, self._incoming = _pieces([codec.num_bytes(self._mine)] * num)
        results, self._results = _pieces([length * self._dtype.itemsize for length in lengths])
        stages = [
            ("Alltoallv", ([*outgoing, mpi.BYTE], [*incoming, mpi.BYTE]), self._add_up),
            ("Allgatherv", (mpi.IN_PLACE, [*results, mpi.BYTE]), None),
        ]
        self.operation = Operation(group, name, signature, stages, outgoing[0].nbytes)

    def fill(self, sources: Sequence[np.ndarray]) -> None:
        super().fill(sources)
        self.encode()

    def encode(self) -> None:
        """Encode what the array holds."""
        for shard, piece in zip(self._shards, self._outgoing):
            piece[:] = self._codec.encode(self._array[shard], self.residual[shard])

    def _add_up(self) -> None:
        with np.errstate(all="ignore"):  # an infinite gradient is the caller's to find
            rows = (self._codec.decode(piece, self._mine) for piece in self._incoming)
            self._results[self._rank][:] = bytes_of(narrowed(functools.reduce(np.add, rows), self._dtype))

    def read(self, out: np.ndarray) -> None:
        for shard, piece in zip(self._shards, self._results):
            out[shard] = narrowed(np.float32(self._codec.scale) * widened(piece.view(self._dtype)), out.dtype)


def _pieces(sizes: Iterable[int]) -> tuple[tuple[np.ndarray, list[int], list[int]], list[np.ndarray]]:
    """(memory, sizes of its pieces in bytes, where they begin), and the pieces."""
    sizes = list(sizes)
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    memory = np.zeros(sum(sizes), np.uint8)
    return (memory, sizes, begins), [memory[begin : begin + size] for begin, size in zip(begins, sizes)]


def rows_of(array: Any) -> np.ndarray:
    """The rows of a row_sparse NDArray: (n,) NumPy records of a row's ``number`` and its ``values``; waits for them.

    Example:
        >>> import mxnet as mx
        >>> rows = rows_of(mx.nd.array([[0, 0], [1, 2], [0, 0]]).tostype("row_sparse"))
        >>> rows["number"].tolist(), rows["values"].tolist()
        ([1], [[1.0, 2.0]])
    """
    rows = np.empty(array.indices.shape[0], [("number", np.int64), ("values", array.dtype, array.shape[1:])])
    rows["number"], rows["values"] = array.indices.asnumpy(), array.data.asnumpy()
    return rows


def add_up(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The sum of arrays of rows: each row that one of them has, added in their order.

    Example:
        >>> import mxnet as mx
        >>> one, two = (rows_of(mx.nd.array(rows).tostype("row_sparse")) for rows in ([[0], [1]], [[2], [3]]))
        >>> add_up([one, two])["values"].tolist()
        [[2.0], [4.0]]
    """
    numbers = np.unique(np.concatenate([array["number"] for array in arrays]))
    total = np.zeros(len(numbers), arrays[0].dtype)
    total["number"] = numbers
    with np.errstate(all="ignore"):  # an infinite gradient is the caller's to find
        for array in arrays:
            total["values"][np.searchsorted(numbers, array["number"])] += array["values"]
    return total


def gather_rows(progress: ProgressEngine, name: bytes, signature: bytes, rows: np.ndarray) -> list[np.ndarray]:
    """The `rows` of every process, by rank, of which each may have another number; waits for all."""
    counts = progress.gather(name, b"number of rows of " + signature, np.array([len(rows)], np.int64))[:, 0]
    ends = np.cumsum(counts)
    everything = np.empty(ends[-1], rows.dtype)
    sizes, begins = counts * rows.itemsize, (ends - counts) * rows.itemsize
    received = [everything.view(np.uint8), sizes.tolist(), begins.tolist(), progress.mpi.BYTE]
    stages = [("Allgatherv", ([rows.view(np.uint8), progress.mpi.BYTE], received), None)]
    progress.wait(Operation(progress.everyone, name, signature, stages, rows.nbytes, once=True))
    return np.split(everything, ends[:-1])
