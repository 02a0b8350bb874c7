"""Batches of samples that are read one by one: the same for the same seed, epoch and batch number."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..errors import BatchMismatch
from .loader import Batches

_MOST_THREADS = 1025  # more is a mistake


class SampleBatches:
    """A pass over a data set each time it is iterated.

    Args:
        dataset: ``dataset[index]`` is one sample, a tuple.
        collate: function of a list of samples, which makes a batch of them. An empty list never reaches it.
        batch_size, shuffle, seed, last_batch, rank, num_workers: as for :func:`gluon_parallel.datasets.batches`.
        transform: function (*sample, random) -> sample, or None. Its `random` is a ``numpy.random.RandomState`` that
            follows from the seed, the epoch and the sample's number: whichever process and thread reads the sample,
            and however training was resumed, it comes out alike.
        num_threads: how many threads read ahead, one batch at a time; 0 reads when a batch is asked for.
    """

    def __init__(self, dataset, collate, batch_size, transform, shuffle, seed, last_batch, rank, num_workers, threads):
        numbers = np.arange(len(dataset))
        if threads not in range(_MOST_THREADS):
            raise BatchMismatch(f"batches: num_threads={threads!r}; expected a whole number below {_MOST_THREADS}")
        self._indices = Batches(numbers, numbers, batch_size, shuffle, seed, last_batch, rank, num_workers)
        self._dataset, self._collate, self._transform = dataset, collate, transform
        self._seed, self._threads = seed, threads

    def __len__(self) -> int:
        """The number of batches in a whole epoch, on every worker."""
        return len(self._indices)

    @property
    def epoch(self) -> int:
        """Of the next pass. A pass that ran to its end moves it on by one."""
        return self._indices.epoch

    @property
    def start(self) -> int:
        """The batch that the next pass begins with."""
        return self._indices.start

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the next pass: which epoch's order, and which batch of it comes first."""
        self._indices.set_epoch(epoch, start)

    def numbers(self, batch: int) -> np.ndarray:
        """Which items of the data set this worker's batch of that number holds, in the epoch `epoch`."""
        if batch not in range(len(self)):
            raise BatchMismatch(f"batches: batch {batch!r} of {len(self)}; they count from 0")
        epoch, start = self.epoch, self.start
        self._indices.set_epoch(epoch, batch)
        numbers, _ = next(iter(self._indices))
        self._indices.set_epoch(epoch, start)
        return numbers

    def __iter__(self) -> Iterator[tuple[np.ndarray, ...]]:
        return self._pass(self.epoch, iter(self._indices))

    def _pass(self, epoch, batches):
        if not self._threads:
            for indices, _ in batches:
                yield self._batch([self._sample(epoch, index) for index in self._wanted(indices)], len(indices))
            return
        with ThreadPoolExecutor(self._threads, "gp-samples") as pool:
            waiting = None
            for indices, _ in batches:
                futures = [pool.submit(self._sample, epoch, index) for index in self._wanted(indices)], len(indices)
                if waiting is not None:
                    yield self._batch([future.result() for future in waiting[0]], waiting[1])
                waiting = futures
            if waiting is not None:
                yield self._batch([future.result() for future in waiting[0]], waiting[1])

    def _wanted(self, indices):
        return indices if len(indices) else [0]  # an empty share is made of a sample that is cut off again

    def _sample(self, epoch, index):
        sample = self._dataset[int(index)]
        if self._transform is None:
            return sample
        return self._transform(*sample, np.random.RandomState([self._seed, epoch, int(index)]))

    def _batch(self, samples, length):
        return tuple(array[:length] for array in self._collate(samples))
