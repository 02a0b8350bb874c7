"""Collective operations of MPI at one key: prepared in the agreed order, started in any, tested until they are done."""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...allreduce import sum_rows
from ...native import function
from ...native.records import address_of
from ...split import shard_bounds
from ..flight_recorder import RECORDER
from .compression import Half, TwoBits
from .shared_memory.rows import DTYPES

if TYPE_CHECKING:
    from .agreement import Circle

TWO_OR_THREE, MOST = 3, 1 << 30  # processes that send whole arrays to each other, of fewer bytes than this
SMALL = 64 * 1024  # bytes up to which the latency of an exchange counts, and not its bytes


def has_persistent() -> bool:
    """Whether this MPI has persistent collective operations, which came with MPI 4; one is made to see.

    The version says nothing: Open MPI 5.0 has them and calls itself MPI 3.1.
    """
    from mpi4py import MPI

    try:
        MPI.COMM_SELF.Barrier_init().Free()
    except (AttributeError, NotImplementedError):  # of mpi4py before 4.0, and of MPI before 4.0
        return False
    return True


class Operation:
    """A collective operation over the processes of `comm` at one key, called again and again.

    MPI's persistent operations are prepared in the same order everywhere and may be started in any. An MPI without them
    has nonblocking ones, whose order is agreed upon at each call. So is that of an operation that is called once.

    Args:
        circle: the :class:`.Circle` of processes that take part.
        name, form: the key, and shape and dtype in words; both as bytes.
        stages: (MPI's name of the operation, its arguments, a function to call after it or None) for each of those that
            follow each other.
        size: bytes, for the flight recorder; None if the exchange is recorded elsewhere.
        once: the operation is called once, and its arguments are the caller's own arrays.
    """

    keeps: Any = None  # what must live as long as it

    def __init__(
        self,
        circle: Circle,
        name: bytes,
        form: bytes,
        stages: Sequence[tuple[str, tuple, Callable[[], None] | None]],
        size: int | None,
        once: bool = False,
    ) -> None:
        self.name, self.form, self.size = name, form, size
        self.circle, self._progress = circle, circle.progress
        self._stages = stages
        self._persistent = self._progress.persistent and not once
        self._requests: list = []  # the persistent ones
        self._stage = 0
        self._calls: collections.deque = collections.deque()  # (before, finish); the first one is under way
        self.since = 0.0
        self._record = 0

    def call(self, before: Callable[[], None], finish: Callable[[Exception | None], None]) -> None:
        """Start the operation when those of earlier calls are done; returns at once.

        Args:
            before: called when the operation's arrays are free, to fill them.
            finish: called with None when it is done, or with the error that ended it.
        """
        self._progress.submit(functools.partial(self._take, before, finish))

    def _take(self, before: Callable[[], None], finish: Callable[[Exception | None], None]) -> None:
        if self._progress.failure is not None:
            finish(self._progress.failure)
            return
        self._calls.append((before, finish))
        if len(self._calls) == 1:
            self._begin()

    def _begin(self) -> None:
        self.since = time.monotonic()
        self._record = 0 if self.size is None else RECORDER.begin(self.name, self.size)
        self._progress.begun(self)
        self._calls[0][0]()
        self._go_on()

    def _go_on(self) -> None:
        if self._requests:
            self.agreed()
        else:
            self.circle.announce(self)

    def prepare(self) -> None:
        """Make MPI's persistent operations; all processes do so in one order."""
        if self._persistent and not self._requests:
            self._requests = [
                getattr(self.circle.comm, f"{what}_init")(*arguments) for what, arguments, _ in self._stages
            ]

    def agreed(self) -> None:
        """Start the stage that is due: all processes have come to this operation."""
        self.prepare()
        if self._requests:
            request = self._requests[self._stage]
            request.Start()
        else:
            what, arguments, _ = self._stages[self._stage]
            request = getattr(self.circle.comm, f"I{what.lower()}")(*arguments)
        self._progress.started[self] = request

    def complete(self) -> None:
        """Take note that MPI has done what was started."""
        after = self._stages[self._stage][2]
        if after is not None:
            after()
        self._stage = (self._stage + 1) % len(self._stages)
        if self._stage:
            self._go_on()
            return
        RECORDER.end(self._record)
        self._progress.waiting.pop(self, None)
        self._calls.popleft()[1](None)
        if self._calls and self._progress.failure is None:
            self._begin()

    def abandon(self, error: Exception) -> None:
        """End all calls with `error`; MPI may still write to the arrays."""
        calls, self._calls = self._calls, collections.deque()
        for _, finish in calls:
            finish(error)

    def used_by_mpi(self) -> tuple:
        """What must live until MPI is done with it, without the progress engine."""
        return self._requests, [arguments for _, arguments, _ in self._stages], self.keeps

    def ranks_missing(self) -> set[int]:
        """Those that are not known to have come."""
        number = self._progress.counts[self.name].get(self.form, 1)
        return self._progress.lost.ranks_behind(self, self.circle.ranks, number)


def allreduce(
    circle: Circle, name: bytes, form: bytes, result: np.ndarray, source: np.ndarray | None = None
) -> Operation:
    """The operation by which `result` becomes the sum over the processes.

    It is the sum of the arrays `source`, or of `result` itself. Open MPI sums a large array along a tree where it is
    summed in place, and between two or three processes. Otherwise it is a reduce-scatter and an allgather.
    """
    if source is not None and are_few(circle, source):
        return _sum_of_few(circle, name, form, result, source)
    mpi = circle.progress.mpi
    stages = [("Allreduce", (mpi.IN_PLACE if source is None else source, result, mpi.SUM), None)]
    return Operation(circle, name, form, stages, result.nbytes)


def are_few(circle: Circle, source: np.ndarray) -> bool:
    """Whether so few processes sum such an array that each sends its whole array to the others."""
    return len(circle.ranks) <= TWO_OR_THREE and source.nbytes < MOST


def _sum_of_few(circle: Circle, name: bytes, form: bytes, result: np.ndarray, source: np.ndarray) -> Operation:
    """The same between two or three, who add up all arrays in one order."""
    operation, addresses = exchange_of_few(circle, name, form, source)
    dtype = DTYPES.index(source.dtype)

    def add_up() -> None:
        _sum_arrays(-1, dtype, dtype, address_of(addresses), len(addresses), address_of(result), source.size)

    operation._stages = [(what, arguments, add_up) for what, arguments, _ in operation._stages]
    return operation


def exchange_of_few(circle: Circle, name: bytes, form: bytes, source: np.ndarray) -> tuple[Operation, np.ndarray]:
    """The operation by which each gets the arrays of all, and where they are then, by rank: addresses, (processes,)."""
    num, place, mpi = len(circle.ranks), circle.place, circle.progress.mpi
    others = np.empty((num - 1, source.size), source.dtype)
    rows = [*others[:place], source, *others[place:]]
    sizes = [0 if other == place else source.nbytes for other in range(num)]
    outgoing = [_bytes(source), sizes, [0] * num, mpi.BYTE]
    incoming = [_bytes(others), sizes, [sum(sizes[:other]) for other in range(num)], mpi.BYTE]
    operation = Operation(circle, name, form, [("Alltoallv", (outgoing, incoming), None)], source.nbytes)
    return operation, np.array([address_of(row) for row in rows])


def broadcast(circle: Circle, name: bytes, form: bytes, array: np.ndarray) -> Operation:
    """The same, to be called once: `array` becomes that of the first process."""
    arguments = [_bytes(array), circle.progress.mpi.BYTE], 0
    return Operation(circle, name, form, [("Bcast", arguments, None)], array.nbytes, once=True)


def allgather(circle: Circle, name: bytes, form: bytes, rows: np.ndarray) -> Operation:
    """The same: each row of `rows` becomes that of its process."""
    mpi = circle.progress.mpi
    arguments = mpi.IN_PLACE, [_bytes(rows), rows[0].nbytes, mpi.BYTE]
    return Operation(circle, name, form, [("Allgather", arguments, None)], rows[0].nbytes)


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
        self._results[self._place][:] = _bytes(sums)

    def read(self, out: np.ndarray) -> None:
        for part, piece in zip(self._parts, self._results):
            out[part] = self._codec.decode_sum(piece.view(self._dtype), out.dtype)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _pieces(sizes: Iterable[int]) -> tuple[tuple[np.ndarray, list[int], list[int]], list[np.ndarray]]:
    """(memory, sizes of its pieces in bytes, where they begin), and the pieces."""
    sizes = list(sizes)
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    memory = np.zeros(sum(sizes), np.uint8)
    return (memory, sizes, begins), [memory[begin : begin + size] for begin, size in zip(begins, sizes)]


_sum_arrays = function("gp_sum_arrays", 7)
