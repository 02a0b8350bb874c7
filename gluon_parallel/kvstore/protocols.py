"""Optional protocols of a store: what some offer beyond sums. A caller asks once, when it makes its plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

Keys = Sequence[Hashable]
Arrays = Sequence[Sequence[Any]]  # for each key, one NDArray per device
Bounds = Sequence[Sequence[int]]  # for each key, where the shards of the processes begin, and the end


@runtime_checkable
class Groups(Protocol):
    """Stores of some of the processes."""

    def subgroup(self, members: Sequence[int] | None) -> Any:
        """A store of the ranks `members`, or None where that is None; all processes call it, in one order."""


@runtime_checkable
class ShardedSums(Protocol):
    """Sums and arrays of which every process has a shard, as a sharded optimizer needs them."""

    def reduce_scatter(self, keys: Keys, arrays: Arrays, bounds: Bounds) -> None:
        """Of each array, every process gets its shard of the sum over all devices and processes (reduce-scatter).

        The other values are undefined afterwards. Values are added up in the order of ``pushpull``.

        Args:
            keys: of parameters, the same in the same order on all processes; what is ready earlier comes earlier.
            arrays: for each key, one NDArray per device, all of which get the sums.
            bounds: as of :meth:`gather_shards`.
        """

    def gather_shards(self, keys: Keys, arrays: Arrays, bounds: Bounds) -> None:
        """Each array, of which every process has a shard, gets the shards of all.

        Args:
            keys: as of :meth:`reduce_scatter`, whose arrays have the same shapes and dtypes.
            arrays: for each key, one NDArray per device. Of the first one's values, flat, those from ``bounds[rank]``
                to ``bounds[rank + 1]`` are this process's shard.
            bounds: for each key (num_workers + 1) numbers, from 0 to the array's size.
        """


@runtime_checkable
class CompressedSums(Protocol):
    """Sums of gradients in fewer bits, for each trainer as it asks."""

    def set_gradient_compression(self, compression_params: Any, trainer: Any = None) -> None:
        """Compress the gradients of `trainer`, or of all that ask for nothing, as MXNet's Trainer has it."""

    def summing_for(self, trainer: Any) -> contextlib.AbstractContextManager[Any]:
        """Within this block, sums are of this trainer's gradients, which it may have asked to compress."""

    def residuals(self, trainer: Any) -> dict[Hashable, np.ndarray]:
        """{key: (n,) array}: what compression left out of a trainer's sums in this process, with nothing under way."""

    def set_residuals(self, residuals: dict[Hashable, np.ndarray], trainer: Any) -> None:
        """Go on from what :meth:`residuals` returned, here or in another process; keys without one begin anew."""


@runtime_checkable
class SparseSums(Protocol):
    """Sums of row_sparse arrays, also by ``pushpull``."""

    def sum_rows(self, key: Hashable, values: Sequence[Any], outs: Sequence[Any]) -> None:
        """The arrays `outs` become the sum of all processes' `values`; waits."""


@runtime_checkable
class Hooks(Protocol):
    """All-gather for communication hooks; such a store also sums under keys that it has not seen before."""

    def allgather(self, key: Hashable, value: Any, out: Any, priority: int = 0) -> None:
        """Row r of `out`, (num_workers, ...), becomes the `value`, (...), of process r; both are on the CPU."""


@runtime_checkable
class Vectors(Protocol):
    """Short vectors of all processes without a sum of arrays: for statistics of layers, and for agreements."""

    def gather(self, key: Hashable, vector: np.ndarray) -> np.ndarray:
        """Every process's `vector`, (n,), by rank: (num_workers, n); waits for all."""

    def shared_gather(self, key: Hashable, vector: np.ndarray) -> Any:
        """Where :meth:`gather` goes through shared memory, for the C library; None if it does not."""

    def reduce(self, key: Hashable, message: np.ndarray, direction: int) -> np.ndarray:
        """The messages of all processes, (n,) float64, combined by :func:`.combine`."""

    def end_of_gather(self, key: Hashable) -> Callable[[], object]:
        """The function that notes that this process gathers at that key no more.

        The garbage collector may call it at any time, also after a loss, when the key is another exchange's.
        """


@runtime_checkable
class Broadcasts(Protocol):
    """Bytes of one process for all, without a sum of arrays."""

    def broadcast_bytes(self, key: Hashable, data: np.ndarray, rank: int) -> None:
        """Send `data`, (n,) uint8, of the process of that rank to all, whose `data` it becomes; waits."""


@runtime_checkable
class Regrouping(Protocol):
    """Processes that go on without those that are lost."""

    def end_exchanges(self) -> None:
        """Wait until what has ended the exchanges has ended all of them, so that no array fails later."""

    def regroup(self) -> list[int]:
        """Meet the processes that are left; all of them call it, with nothing in flight.

        The store's ``rank`` and ``num_workers`` are others then; ``ranks`` are still the numbers that the processes
        began with.

        Returns:
            The numbers of those that were lost.

        Raises:
            WorkerLost: fewer processes are left than shall go on, or a process that is left did not come in time.
            WorkerLost, WorkersDiffer: what has ended the exchanges, where MPI has lost no process.
        """

    def take_part_in(self, progress: Any) -> None:
        """Exchange through another progress engine from now on; keys are agreed upon anew."""


def summing_for(store: Any, trainer: Any) -> contextlib.AbstractContextManager[Any]:
    """As of :class:`CompressedSums`, of a store that may not offer it."""
    return store.summing_for(trainer) if offers(store, CompressedSums) else contextlib.nullcontext()


def offers(store: Any, protocol: Any) -> bool:
    """Whether a store, or a class of stores, has what a protocol of this file asks for.

    Example:
        >>> offers(None, Groups)
        False
    """
    return isinstance(store, protocol)
