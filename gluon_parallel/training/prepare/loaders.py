"""One process's part of a loader's batches."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, Callable, Optional

from ...errors import BatchMismatch
from ...mxnet.compat import mx
from ...mxnet.device_threads.seeds import derive_seed, seed_this_thread
from ...mxnet.loaders import (
    batch_sampler_of,
    dataset_of,
    first_number,
    last_batch_of,
    mapped_data,
    sampler_in,
    set_batch_sampler,
    size_of_batch,
)
from ...step.sampler import BatchSampler
from ..seeding import reseed
from . import loader_warnings
from .empty import without_samples

_data = mx.gluon.data
_LAST_BATCH = {"keep": "pad", "discard": "discard"}  # Gluon's words and the sampler's
_ROLLOVER = "last_batch='rollover', of which an epoch leaves samples over for the next one"


class LoaderShard:
    """The part of one process of every batch of a loader; each pass takes the next epoch's order.

    Of a batch with fewer samples than processes, the part of some is empty, see :func:`.without_samples`.
    """

    def __init__(self, loader: Any, order: Any, batch_axis: int = 0, sampler: Optional[_Numbered] = None) -> None:
        self._loader, self._order, self._batch_axis = loader, order, batch_axis
        self._sampler = sampler  # of a DataLoader, which others may have been given too
        self.between = self.at_end = lambda: None  # called between two batches of a pass, and at its end
        # Called with the number of a batch before it is read, where a pass begins in the middle and reads those before.
        self.reseed: Callable[[int], None] = lambda number: None
        self.set_epoch(0)

    def __len__(self) -> int:
        """The number of batches, the same on every process."""
        return len(self._loader)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the order of the next pass, and how many of its batches have been seen already."""
        self.epoch, self._start = epoch, start
        self.under_way: Optional[_Pass] = None  # a pass

    @property
    def position(self) -> list[int]:
        """What :meth:`set_epoch` needs to continue here."""
        return [self.epoch, self._start] if self.under_way is None else [self.under_way.epoch, self.under_way.number]

    def numbers(self) -> Any:
        """The sample numbers of the next pass of all processes, in its order, (N,); None: the loader chooses them.

        BatchMismatch: it leaves samples out.
        """
        numbers = None if isinstance(self._order, _Own) else self._order.numbers(self.epoch)
        left_out = 0 if numbers is None else self._order.length - len(numbers)
        if left_out or self.is_rollover:
            which = f"{left_out} of {self._order.length} samples" if left_out else "samples for its next pass"
            raise BatchMismatch(f"predict: the loader leaves out {which}; make one with last_batch='keep'")
        return numbers

    @property
    def is_rollover(self) -> bool:
        """Whether the loader keeps samples for its next pass."""
        return _is_rollover(self._order)

    def __iter__(self) -> Iterator[Any]:
        under_way = _Pass(self._read, self.epoch, self._start)
        self.set_epoch(self.epoch + 1)  # now: a pass that breaks off is not repeated
        self.under_way = under_way
        try:
            for batch in under_way:
                yield batch
                self.between()
            self.at_end()
        finally:
            if self.under_way is under_way:
                self.under_way = None

    def _read(self, epoch: int, start: int) -> Iterator[Any]:
        """The batches of an epoch from that of number `start` on."""
        order = self._order
        order.set_epoch(epoch, start)
        if self._sampler is not None:
            set_batch_sampler(self._loader, self._sampler)
        first = order.start
        if first < start:
            self.reseed(first)
        batches = enumerate(self._loader, first)
        for number in range(first, start):
            next(batches, None)
            self.reseed(number + 1)
        num_real = getattr(order, "num_real", None)
        for number, batch in batches:
            has_samples = num_real is None or num_real(number)
            yield batch if has_samples else without_samples(batch, self._batch_axis)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """In here a pass is none of training: nothing is called between its batches, and it takes no order away."""
        before = self.epoch, self._start, self.under_way, self.between, self.at_end
        num_workers, self.between, self.at_end = self._order.num_workers, lambda: None, lambda: None
        try:
            yield
        finally:
            self.epoch, self._start, self.under_way, self.between, self.at_end = before
            if self.under_way is not None and self._order.num_workers != num_workers:  # a loss has divided that in here
                self.under_way.go_to(self.under_way.number)

    def divide(self, rank: int, num_workers: int) -> None:
        """Read the part of process `rank` of fewer ones from the next batch on, also of a pass that is under way."""
        self._order.rank, self._order.num_workers = rank, num_workers
        if self.under_way is not None:
            self.under_way.go_to(self.under_way.number)


class _Pass:
    """A pass over the batches of an epoch from number `start` on, which can go back; it keeps the last one."""

    def __init__(self, read: Callable[[int, int], Iterator[Any]], epoch: int, start: int) -> None:
        self.epoch, self.batch, self._read = epoch, None, read
        self.go_to(start)

    def go_to(self, number: int) -> None:
        """Read on from the batch of that number."""
        self.number, self._batches = number, self._read(self.epoch, number)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.batch = next(self._batches)
        self.number += 1
        return self.batch


def shard_loader(loader: Any, rank: int, num_workers: int, seed: int, batch_axis: int = 0) -> Any:
    """The part of process `rank` of a loader, itself if it is one; TypeError: it cannot be divided.

    A ``gluon.data.DataLoader`` reads that part from then on. Others have ``shard(rank, num_workers)``, as
    ``gp.datasets.batches``. One process takes any iterable, and resets an ``mx.io.DataIter`` between its passes.
    `batch_axis` counts the samples in arrays, which matters where a part has none.
    """
    if isinstance(loader, LoaderShard):
        return loader
    if isinstance(loader, _data.Dataset):
        kind = type(loader).__name__
        raise TypeError(f"a loader is the data set {kind}; write gluon.data.DataLoader(data, batch_size=..., ...)")
    if hasattr(loader, "shard"):
        part = loader.shard(rank, num_workers)
        return LoaderShard(part, part, batch_axis)
    if isinstance(loader, _data.DataLoader):
        sampler = batch_sampler_of(loader)
        sampler = getattr(sampler, "given", sampler)  # in place of that of an earlier training
        _check_has_samples(loader)
        order = _order(sampler, rank, num_workers, seed)
        if order is not None:
            loader_warnings.warn(loader, rank, num_workers)
            numbered = _Numbered(order, seed, sampler)
            set_batch_sampler(loader, numbered)  # its workers know the data set alone
            loader.auto_reload = False  # it would read the next pass ahead in the order of this one
            loader.clean()
            return LoaderShard(loader, order, batch_axis, numbered)
    elif not hasattr(loader, "__iter__"):
        raise TypeError(f"a loader is a {type(loader).__name__}; expected something that yields batches")
    elif num_workers == 1:
        return LoaderShard(loader, _Own(loader))
    kind = type(loader).__name__
    if isinstance(loader, _data.DataLoader):
        own = f"a {type(sampler_in(sampler, sampler)).__name__} of its own"
        kind += f" with {_ROLLOVER if _is_rollover(sampler) else own}"
    raise TypeError(
        f"cannot divide a {kind} among {num_workers} processes. Pass a DataLoader(data, batch_size, shuffle=...) whose "
        "last_batch is 'keep' or 'discard', or gp.datasets.batches; or leave it out and let each process read its "
        "part, by gp.sampler.BatchSampler(..., rank=..., num_workers=...), and gp.sampler.join for parts of two lengths"
    )


def _check_has_samples(loader: Any) -> None:
    """Refuse a DataLoader that would yield no batch, as its data set is empty."""
    data = dataset_of(loader)
    if not hasattr(data, "__len__") or len(data):
        return
    while (
        (inner := mapped_data(data)) is not None and hasattr(inner, "__len__") and not isinstance(inner, (tuple, list))
    ):
        data = inner
    raise BatchMismatch(
        f"the DataLoader's data set, of the class {type(data).__name__}, is empty: its len() is 0. Look at what it is "
        "made of: a folder or file in which it finds nothing that it reads, or a filter that leaves nothing"
    )


class _Own:
    """The order of a loader or sampler that cannot be divided, for one process; every pass begins with batch 0."""

    rank = start = epoch = 0
    num_workers = 1

    def __init__(self, batches: Any) -> None:
        self.batches, self._has_begun = batches, False

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def set_epoch(self, epoch: int, start: int) -> None:
        self.epoch = epoch
        if self._has_begun and isinstance(self.batches, mx.io.DataIter):
            self.batches.reset()  # else it stays at its end; a new one is at its beginning
        self._has_begun = True


class _Numbered:
    """The batches of an order, in place of those `given`; a worker's random numbers follow from the batch's number."""

    def __init__(self, order: Any, seed: int, given: Any) -> None:
        self.order, self._seed, self.given = order, seed, given
        numbers: Any = sampler_in(given)
        is_shifted = type(numbers) is _data.SequentialSampler and isinstance(order, BatchSampler)
        self._first = first_number(numbers) if is_shifted else 0  # the number of the sample that the order calls 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Any]:
        process, epoch, start = os.getpid(), self.order.epoch, self.order.start
        num_real = getattr(self.order, "num_real", None)
        for number, samples in enumerate(self.order, start):
            if num_real is not None:  # without repeated ones; one is read, to know what an empty part looks like
                samples = samples[: max(num_real(number), 1)]
            if self._first:
                samples = [self._first + sample for sample in samples]
            yield _Samples(samples, (self._seed + self.order.rank, epoch, number), process)


class _Samples(list):
    """The numbers of a batch's samples; seeds when another process than `process`, or a thread, begins to read them."""

    def __init__(self, numbers: Any, seeds: tuple[int, int, int], process: int) -> None:
        super().__init__(numbers)
        self.seeds, self.process = seeds, process

    def __reduce__(self) -> Any:
        return _Samples, (list(self), self.seeds, self.process)

    def __iter__(self) -> Iterator[int]:
        if os.getpid() != self.process:
            reseed(*self.seeds)
        elif threading.current_thread() is not threading.main_thread():  # which has generators of MXNet alone
            seed_this_thread(derive_seed(*self.seeds))
        return super().__iter__()


def _is_rollover(order: Any) -> bool:
    return last_batch_of(getattr(order, "batches", order)) == "rollover"


def _order(sampler: Any, rank: int, num_workers: int, seed: int) -> Any:
    """The sampler of process `rank`, or None if this one cannot be divided among several."""
    if isinstance(sampler, BatchSampler):
        return sampler.shard(rank, num_workers)
    kind = type(sampler_in(sampler))
    plain = type(sampler) is _data.BatchSampler and kind in (_data.SequentialSampler, _data.RandomSampler)
    if not plain or last_batch_of(sampler) not in _LAST_BATCH:
        return _Own(sampler) if num_workers == 1 else None
    shuffle, last_batch = kind is _data.RandomSampler, _LAST_BATCH[last_batch_of(sampler)]
    whole = BatchSampler(
        len(sampler_in(sampler)), size_of_batch(sampler), shuffle=shuffle, seed=seed, last_batch=last_batch
    )
    return whole.shard(rank, num_workers)
