"""Base class of all loaders (order, epochs, a process's share), and batches of arrays in memory."""

from typing import Any

import numpy as np

from .. import split
from ..errors import BatchMismatch
from ..step.sampler import SEEDS, BatchSampler


class Loader(BatchSampler):
    """A pass over the data each time it is iterated: the same for the same seed, epoch and batch number.

    Attributes are those of :class:`.BatchSampler`, arguments and errors those of :class:`Batches`.
    """

    _LAST_BATCH = ("keep", "discard")  # Gluon's words
    num_real: Any = None  # no sample is repeated

    def __init__(self, length, batch_size, rank=0, num_workers=1, shuffle=False, seed=0, last_batch="keep"):
        super().__init__(length, batch_size, rank, num_workers, shuffle, seed, last_batch)

    def _pass(self, epoch, start):
        numbers = self._global_batches(self._random(epoch))[start : len(self)]
        yield from self._read(epoch, ((self._of_this_worker(samples), samples) for samples in numbers))
        self.set_epoch((epoch + 1) % SEEDS)

    def numbers(self, epoch: int) -> np.ndarray:
        """As of :class:`gluon_parallel.sampler.BatchSampler`."""
        return np.concatenate(self._global_batches(self._random(epoch))[: len(self)])

    def _global_batches(self, random):
        """The numbers of the samples in each batch of all workers together; a list of arrays."""
        return self._in_batches(self._order(random))

    def _in_batches(self, order):
        return [
            order[first : first + self._global_batch_size] for first in range(0, len(order), self._global_batch_size)
        ]

    def _of_this_worker(self, samples):
        first, stop = split.shard_bounds(len(samples), self.rank, self.num_workers)
        return samples[first:stop]

    def _read(self, epoch, numbers):
        """Yield the batch for each pair in `numbers`: this worker's samples, and those of all workers together."""
        raise NotImplementedError


class Batches(Loader):
    """Batches (images, labels) as NumPy arrays on the host, new in every pass; ``gp.datasets.batches(...)``.

    Args:
        images: (N, ...) array.
        labels: (N, ...) array; row i belongs to image i.
        batch_size, shuffle, seed, rank, num_workers: as for :class:`gluon_parallel.sampler.BatchSampler`. All workers
            have the same number of batches, and only of a last one that is smaller than `num_workers` the share of some
            is empty.
        last_batch: "keep" a last batch that is smaller, or "discard" it.

    Raises:
        BatchMismatch: there are no samples, images and labels differ in length, or an argument makes no sense.

    Example:
        >>> loader = Batches(np.arange(5.0), np.arange(5), batch_size=2)
        >>> [labels.tolist() for images, labels in loader]
        [[0, 1], [2, 3], [4]]
        >>> loader.set_epoch(7, start=2)  # go on in the middle of an epoch
        >>> [labels.tolist() for images, labels in loader]
        [[4]]
    """

    def __init__(self, images, labels, batch_size, shuffle=False, seed=0, last_batch="keep", rank=0, num_workers=1):
        self._images, self._labels = _host(images, "images"), _host(labels, "labels")
        check_lengths(self._images, self._labels)
        super().__init__(len(self._images), batch_size, rank, num_workers, shuffle, seed, last_batch)

    def _read(self, epoch, numbers):
        for mine, _ in numbers:
            yield self._images[mine], self._labels[mine]  # copies: who changes a batch does not change the data


def check_lengths(samples, labels) -> None:
    """Refuse samples and labels of different number, or none."""
    if len(samples) == 0:
        raise BatchMismatch("batches: no samples at all; pass at least one with its label")
    if len(samples) != len(labels):
        raise BatchMismatch(f"batches: {len(samples)} samples but {len(labels)} labels; each sample needs one label")


def _host(data, name) -> np.ndarray:
    """The data as a NumPy array that has a length."""
    array = np.asarray(data)
    if array.ndim == 0:
        raise BatchMismatch(f"batches: {name} is a single {array.dtype} value; pass an array with one row per sample")
    return array
