"""Arrays with a row per sample, of which each process has some rows: those of all, in the order of the ranks."""

from __future__ import annotations

import math
import pickle
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..environment import PATIENCE, default_timeout
from ..mxnet.attached import Attached
from ..mxnet.compat import mx
from .contract import contract
from .gathering import gathered, prepare_gather
from .handshake import differ
from .reserved_keys import FIRST_ROWS, ROW_COUNTS, ROW_FORMS
from .work import NumberSum

nd = mx.nd
_LEAST = 10  # the smallest vector that is summed has 2 ** 10 values
_BLOCK = 64  # of 64 bits, in each exchange of a form
_EXACT = {np.dtype(name) for name in ("float16", "float32", "uint8", "int8", "bool")}  # float32 holds their values
_SAME_ARRAYS = "The net must return, and the loss get, the same kinds of arrays on every process: pad them to one shape"


class RowForm(NamedTuple):
    """What all processes must have in common, for each array."""

    shapes: Sequence[tuple[int, ...]]  # of a row
    dtypes: Sequence[str]
    nesting: Any  # of the caller's: how the arrays are nested, which a process without rows is told

    def __str__(self) -> str:
        return ", ".join(f"{dtype} {shape}" for shape, dtype in zip(self.shapes, self.dtypes)) or "no arrays"


class RowsOfAll(NamedTuple):
    """The rows of all processes."""

    begin: int  # number of this process's first row
    is_first: bool  # whether this is the first process that has rows
    nesting: Any
    arrays: Sequence[Any]  # NDArrays on the CPU, (rows of all processes, ...)


class ProcessRows:
    """Gathers rows over the processes of `store`, call by call.

    All arrays of a call travel as one vector, which is summed: each process has zeros in the place of the others' rows,
    so every store can do it, and the sum has the bits of what was sent. Vectors have sizes of powers of two, so a
    store is asked for few keys, however many rows batches have. Of dtypes that float32 does not hold, a value is sent
    as the sum of three float32; whole numbers are exact up to 2**53.

    Every process makes it before the first call, and calls equally often.
    """

    def __init__(self, store: Any) -> None:
        self._store = contract(store)
        self.ranks = self._store.ranks
        self._sums: dict[int, NumberSum] = {}  # binary logarithm of the size -> what sums such vectors
        for key, length in ((ROW_COUNTS, 2), (ROW_FORMS, _BLOCK)):
            self._store.describe(key, "the outputs of the whole batch")
            prepare_gather(self._store, key, length)

    def gather(self, num: int, form: RowForm | None, arrays: Sequence[Any]) -> RowsOfAll | None:
        """The rows of all processes; None if no process has any.

        It waits until all processes have called it, not for the arrays.

        Args:
            num: how many rows this process has, also 0.
            form: of this process's arrays; None without rows.
            arrays: ``mx.nd`` arrays (num, ...) on any device; none without rows.

        Raises:
            WorkersDiffer: another process has rows of another form, or another number of arrays.
            BarrierTimeout, WorkerLost: another process has not called it in time.
        """
        words = str(form) if num else ""
        counts = self._gather(ROW_COUNTS, np.array([num, zlib.crc32(words.encode())], np.float64))
        sizes = counts[:, 0].astype(int).tolist()
        if not any(sizes):
            return None
        checksums = {int(checksum) for size, checksum in counts if size}
        if len(checksums) > 1 or 0 in sizes:
            found = {rank: said for rank, said in zip(self.ranks, self._forms(form if num else None)) if said}
            if len(checksums) > 1:
                said = {rank: f"give rows of {one}" for rank, one in found.items()}
                raise differ(f"store {self._store.type!r}, the outputs of the whole batch", said, _SAME_ARRAYS)
            form = next(iter(found.values()))
        assert form is not None
        begin, total = sum(sizes[: self._store.rank]), sum(sizes)
        with mx.autograd.pause():
            whole = self._summed(form, arrays, begin, num, total)
        return RowsOfAll(begin, num > 0 and begin == 0, form.nesting, whole)

    def _gather(self, key: int, vector: np.ndarray) -> np.ndarray:
        return gathered(self._store, key, vector, PATIENCE * default_timeout())

    def _forms(self, form: RowForm | None) -> list[RowForm | None]:
        """The forms of all processes, by rank."""
        data, block = pickle.dumps(form, protocol=5), 8 * _BLOCK
        message = len(data).to_bytes(8, "little") + data
        rows, most = [b""] * len(self.ranks), 1
        while len(rows[0]) < most:
            own = message[len(rows[0]) :][:block].ljust(block, b"\0")
            rows = [row + more.tobytes() for row, more in zip(rows, self._gather(ROW_FORMS, np.frombuffer(own)))]
            most = max(8 + int.from_bytes(row[:8], "little") for row in rows)
        return [pickle.loads(row[8:]) for row in rows]  # which ignores what follows

    def _summed(self, form: RowForm, arrays: Sequence[Any], begin: int, num: int, total: int) -> list[Any]:
        sizes = [math.prod(shape) for shape in form.shapes]  # of a row
        numbers = [1 if np.dtype(dtype) in _EXACT else 3 for dtype in form.dtypes]  # of float32 for a value
        length = total * sum(size * number for size, number in zip(sizes, numbers))
        power = max(_LEAST, (length - 1).bit_length())
        if power not in self._sums:
            self._sums[power] = NumberSum(self._store, FIRST_ROWS + power - _LEAST, 1 << power, "float32")
        pieces: list[Any] = []
        for size, number, array in zip(sizes, numbers, arrays) if num else ():
            for term in _float32_terms(array, number):
                pieces += [_zeros(begin * size), term.reshape(-1), _zeros((total - begin - num) * size)]
        pieces.append(_zeros((1 << power) - (length if num else 0)))
        summed = self._sums[power].start(nd.concat(*[piece for piece in pieces if piece is not None], dim=0)).array
        whole, end = [], 0
        for shape, dtype, size, number in zip(form.shapes, form.dtypes, sizes, numbers):
            ends = [end + total * size * (place + 1) for place in range(number)]
            pieces = [nd.slice_axis(summed, axis=0, begin=last - total * size, end=last) for last in ends]
            values = pieces[0] if number == 1 else sum(piece.astype("float64") for piece in reversed(pieces))
            whole.append(values.astype(dtype, copy=False).reshape((total, *shape)))
            end = ends[-1]
        return whole


def _zeros(size: int) -> Any:
    return nd.zeros(size, ctx=mx.cpu()) if size else None


def _float32_terms(array: Any, number: int) -> Iterator[Any]:
    """Float32 arrays on the CPU, so many, whose sum is the array."""
    rest = array.as_in_context(mx.cpu()).astype("float32" if number == 1 else "float64")
    for _ in range(number - 1):
        term = rest.astype("float32")
        yield term
        rest = rest - term.astype("float64")
        rest = nd.where(rest == rest, rest, nd.zeros_like(rest))  # of infinite values, whose difference is NaN
    yield rest.astype("float32", copy=False)


_of_stores: Attached[ProcessRows] = Attached("process_rows")


def rows_over(store: Any) -> ProcessRows:
    """What gathers rows over the processes of this store, made anew after a loss; all processes call it."""
    rows = _of_stores.of(store)
    if rows is None or rows.ranks != contract(store).ranks:
        rows = _of_stores.set(store, ProcessRows(store))
    return rows
