"""Batches of one process: disjoint from the others', shuffled alike, and equally many on every process."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np

from .. import split
from ..errors import BatchMismatch
from ..kvstore import as_store, separate_training
from ..kvstore.contract import contract
from ..kvstore.reserved_keys import JOIN
from ..kvstore.work import NumberSum
from ..mxnet.attached import Attached
from ..mxnet.compat import mx

_Batch = TypeVar("_Batch")
SEEDS = 2**32  # what NumPy's RandomState accepts
LAST_BATCH = ("pad", "discard")
_sums: Attached[NumberSum] = Attached("join")  # of stores, under JOIN


def _is_seed(number: object) -> bool:
    return isinstance(number, (int, np.integer)) and bool(0 <= number < SEEDS)


class BatchSampler(mx.gluon.data.Sampler):
    """Lists of sample numbers for ``gluon.data.DataLoader(batch_sampler=...)``, of one process among several.

    Batch i of all processes together is batch i of one process alone; the order follows from `seed` and the epoch. So
    all have equally many batches, without asking each other.
    What augments images should differ between processes instead: ``gp.reseed(seed + rank, epoch, step)``.

    Args:
        length: how many samples the data set has.
        batch_size: samples per batch and process.
        rank, num_workers: which process this is, of how many: ``store.rank`` and ``store.num_workers``.
        shuffle: take another order in every epoch.
        seed: from 0 to 2**32 - 1; the same on every process.
        last_batch: what becomes of samples that do not fill a batch on every process: they are divided evenly, and
            where a process then has one fewer than others it repeats one ("pad"), or they are left out ("discard").

    Attributes:
        epoch: of the next pass; a pass that ran to its end moves it on.
        start: the batch that the next pass begins with.
        length, rank, num_workers: as given.

    Raises:
        BatchMismatch: an argument makes no sense, or "discard" leaves nothing.

    Example:
        >>> samplers = [BatchSampler(7, 2, rank=rank, num_workers=2) for rank in range(2)]
        >>> [list(sampler) for sampler in samplers]
        [[[0, 1], [4, 4]], [[2, 3], [5, 6]]]
        >>> samplers[0].num_real(1)  # this process repeats sample 4
        1
    """

    _LAST_BATCH: tuple[str, ...] = LAST_BATCH

    def __init__(
        self,
        length: int,
        batch_size: int,
        rank: int = 0,
        num_workers: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        last_batch: str = "pad",
    ) -> None:
        for name, value in (("length", length), ("batch_size", batch_size), ("num_workers", num_workers)):
            if not isinstance(value, numbers.Integral) or value < 1:
                hint = ": write len(data)" if hasattr(value, "__len__") and name == "length" else ""
                raise BatchMismatch(f"sampler: {name}={_short(value)}; expected a whole number of at least 1{hint}")
        _check_rank(rank, num_workers)
        if not _is_seed(seed):
            raise BatchMismatch(f"sampler: seed={seed!r}; expected a whole number from 0 to {SEEDS - 1}")
        if last_batch not in self._LAST_BATCH:
            words = ", ".join(map(repr, self._LAST_BATCH))
            raise BatchMismatch(f"sampler: last_batch={last_batch!r} is none of {words}")
        self.length, self.rank, self.num_workers = length, rank, num_workers
        self._shuffle, self._seed = shuffle, seed
        self._global_batch_size = batch_size * num_workers  # samples of batch i of all processes
        self._whole, self._rest = divmod(length, self._global_batch_size)
        self._num_batches = self._whole + (self._rest > 0 and last_batch != "discard")
        if self._num_batches == 0:
            raise BatchMismatch(
                f"sampler: {length} samples do not fill one batch on each of {num_workers} processes, and "
                f"last_batch='discard' drops the rest; take smaller batches or last_batch={self._LAST_BATCH[0]!r}"
            )
        self.epoch = self.start = 0
        separate_training.note("the sampler", num_workers > 1, separate_training.WHOLE_DATA)

    def shard(self, rank: int, num_workers: int) -> BatchSampler:
        """The sampler of process `rank` of `num_workers` that share this one's batches.

        Args:
            rank, num_workers: which process, of how many. They need not divide the batch: where one has a sample less
                than another, it repeats one in its place.

        Raises:
            BatchMismatch: this sampler is another process's already, or `rank` makes no sense.

        Example:
            >>> [list(BatchSampler(7, 4).shard(rank, 3)) for rank in range(3)]
            [[[0, 0], [4]], [[1, 0], [5]], [[2, 3], [6]]]
        """
        if (self.rank, self.num_workers) not in ((0, 1), (rank, num_workers)):
            raise BatchMismatch(f"sampler: it is that of process {self.rank} of {self.num_workers}, not {rank}")
        _check_rank(rank, num_workers)
        part = copy.copy(self)
        part.rank, part.num_workers = rank, num_workers
        separate_training.note("the sampler", num_workers > 1, separate_training.WHOLE_DATA)
        return part

    def __len__(self) -> int:
        """The number of batches, the same on every process."""
        return self._num_batches

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the next pass: its epoch, from 0, and how many of its batches have been seen already.

        The order follows from the seed and the epoch alone. BatchMismatch: a number is out of range.
        """
        if not _is_seed(epoch):
            raise BatchMismatch(f"sampler: epoch={epoch!r}; expected a whole number from 0")
        if not isinstance(start, (int, np.integer)) or not 0 <= start <= len(self):
            raise BatchMismatch(f"sampler: start={start!r}; expected a whole number from 0 to {len(self)}")
        self.epoch, self.start = epoch, start

    def numbers(self, epoch: int) -> np.ndarray:
        """The sample numbers of that epoch's pass, of all processes together and in its order, (N,)."""
        return self._order(self._random(epoch))[: self._num_batches * self._global_batch_size]

    def num_real(self, number: int) -> int:
        """How many samples of the batch of that number are real; the others, at its end, are repeated ones."""
        first, stop = self._bounds_of_shard(number)
        return stop - first

    def _bounds_of_shard(self, number: int) -> tuple[int, int]:
        """This process's slice of the order, padding left out."""
        if not 0 <= number < self._num_batches:
            raise BatchMismatch(f"sampler: batch {number} of {self._num_batches}; batches count from 0")
        samples = self._global_batch_size if number < self._whole else self._rest
        first, stop = split.shard_bounds(samples, self.rank, self.num_workers)
        return number * self._global_batch_size + first, number * self._global_batch_size + stop

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator itself: epoch and start are read by iter(), not when the first batch is asked for.
        return self._pass(self.epoch, self.start)

    def _random(self, epoch: int) -> np.random.RandomState:
        # NumPy has frozen the stream of RandomState, so an epoch can be resumed under another version of NumPy.
        return np.random.RandomState([self._seed, epoch])

    def _order(self, random: np.random.RandomState) -> np.ndarray:
        order = np.arange(self.length)
        return random.permutation(order) if self._shuffle else order

    def _pass(self, epoch: int, start: int) -> Iterator[list[int]]:
        order = self._order(self._random(epoch))
        for number in range(start, self._num_batches):
            first, stop = self._bounds_of_shard(number)
            size = -(-(self._global_batch_size if number < self._whole else self._rest) // self.num_workers)
            repeated = order[number * self._global_batch_size :][: size - (stop - first)]
            yield [int(sample) for sample in (*order[first:stop], *repeated)]
        self.set_epoch((epoch + 1) % SEEDS)


def _check_rank(rank: object, num_workers: int) -> None:
    if rank not in range(num_workers):
        hint = ": write store.rank, store.num_workers" if hasattr(rank, "num_workers") else ""
        raise BatchMismatch(f"sampler: rank={_short(rank)}; expected a number from 0 to {num_workers - 1}{hint}")


def _short(value: object) -> str:
    """`value` in an error, where it may be a whole data set."""
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"


def join(batches: Iterable[_Batch], store: mx.kv.KVStoreBase) -> Iterator[_Batch | None]:
    """This process's batches, and then None for as long as another process still has some.

    For streams whose length nobody knows beforehand. Every turn asks all processes once. ``DataParallel.step(None)``
    takes part with zero samples, in SyncBatchNorm layers too, so that the others can go on.

    Args:
        batches: iterable of anything but None; of any length, also none.
        store: the KVStore through which the processes meet, which sums: made with ``gp.kvstore.create``.

    Raises:
        WorkerLost: another process did not ask within ten times ``GLUON_PARALLEL_TIMEOUT``.

    Example:
        >>> store = mx.kv.create("local")
        >>> [batch for batch in join(["first", "second"], store)]
        ['first', 'second']
    """
    alive = _sums.of(as_store(store, "gp.sampler.join")) or _sums.set(store, NumberSum(contract(store), JOIN, 1))
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        total = alive.start([batch is not None])
        if not total.wait("Every process must ask gp.sampler.join for its batches")[0]:
            return
        yield batch
