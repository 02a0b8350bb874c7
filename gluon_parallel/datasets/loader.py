"""Batches of images and labels in memory, and what all loaders share: order, epochs, and a process's share."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import split
from ..errors import BatchMismatch
from ..kvstore import separate_training

LAST_BATCH = ("keep", "discard")  # Gluon's words
_SEEDS = 2**32  # what NumPy's RandomState accepts


class Loader:
    """A pass over the data each time it is iterated: the same for the same seed, epoch and batch number.

    Args:
        length: how many samples there are.
        batch_size: samples per batch and worker.
        shuffle: take the samples in an order that follows from `seed` and the epoch alone.
        seed: from 0 to 2**32 - 1.
        last_batch: "keep" a last batch that is smaller, or "discard" it.
        rank: this worker's number, from 0.
        num_workers: how many workers share the data. Their batches of the same number together are the batch that one
            worker alone would get with ``batch_size * num_workers``; so all have the same number of batches, and only
            of a last batch that is smaller than `num_workers` the share of some is empty.

    Attributes:
        epoch: of the next pass. A pass that ran to its end moves it on by one, so that no two passes are alike.
        start: the batch that the next pass begins with.

    Raises:
        BatchMismatch: there are no samples, or an argument makes no sense.
    """

    def __init__(self, length, batch_size, shuffle=False, seed=0, last_batch="keep", rank=0, num_workers=1):
        size = _integer("batch_size", batch_size, least=1)
        self._workers = _integer("num_workers", num_workers, least=1)
        self._rank = _integer("rank", rank, least=0, below=self._workers)
        self._seed = _integer("seed", seed, least=0, below=_SEEDS)
        self._length, self._shuffle = length, shuffle
        if length == 0:
            raise BatchMismatch("batches: no samples at all; pass at least one")
        if last_batch not in LAST_BATCH:
            raise BatchMismatch(f"batches: last_batch={last_batch!r} is none of {', '.join(map(repr, LAST_BATCH))}")
        self._together = size * self._workers  # samples that all workers see between two updates
        whole, rest = divmod(length, self._together)
        self._num_batches = whole + (rest > 0 and last_batch == "keep")
        if self._num_batches == 0:
            raise BatchMismatch(
                f"batches: {length} samples do not fill one batch of {self._together} (batch_size {size} x num_workers "
                f"{self._workers}), and last_batch='discard' drops the rest; take smaller batches or last_batch='keep'"
            )
        self.epoch = self.start = 0
        separate_training.note("the sampler", self._workers > 1, separate_training.WHOLE_DATA)

    def __len__(self) -> int:
        """The number of batches in a whole epoch, on every worker, whatever `start` is."""
        return self._num_batches

    def share(self, rank: int, num_workers: int) -> Loader:
        """The part of these batches that is one of several processes'; `batch_size` stays that of all together.

        Args:
            rank, num_workers: which process, of how many.

        Example:
            >>> [labels.tolist() for _, labels in batches(np.zeros(5), np.arange(5), batch_size=3).share(1, 2)]
            [[1, 2], [4]]
        """
        part = copy.copy(self)
        part._workers = _integer("num_workers", num_workers, least=1)
        part._rank = _integer("rank", rank, least=0, below=num_workers)
        return part

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the next pass: which epoch's order, and which batch of it comes first.

        Args:
            epoch: from 0; the order of the samples follows from the seed and this number alone.
            start: how many batches of that epoch have been seen already; ``len(self)`` leaves none.

        Raises:
            BatchMismatch: a number is out of range.
        """
        epoch = _integer("epoch", epoch, least=0, below=_SEEDS)
        self.start = _integer("start", start, least=0, below=len(self) + 1)
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        # Not a generator itself: epoch and start are those of the moment when the pass begins, not of its first batch.
        return self._pass(self.epoch, self.start)

    def _pass(self, epoch, start):
        # NumPy has frozen the stream of RandomState, so an epoch can be resumed under another version of NumPy.
        numbers = self._cut(np.random.RandomState([self._seed, epoch]))[start : self._num_batches]
        yield from self._read(epoch, ((self._own(samples), samples) for samples in numbers))
        self.set_epoch((epoch + 1) % _SEEDS)

    def _cut(self, random):
        """The numbers of the samples in each batch of all workers together; a list of arrays."""
        order = np.arange(self._length)
        return self._slices(random.permutation(order) if self._shuffle else order)

    def _slices(self, order):
        return [order[first : first + self._together] for first in range(0, len(order), self._together)]

    def _own(self, samples):
        first, stop = split.share(len(samples), self._rank, self._workers)
        return samples[first:stop]

    def _read(self, epoch, numbers):
        """Yield the batch for each pair in `numbers`: this worker's samples, and those of all workers together."""
        raise NotImplementedError


class Batches(Loader):
    """Batches of arrays; made by :func:`batches`."""

    def __init__(self, images, labels, *options):
        self._images, self._labels = _host(images, "images"), _host(labels, "labels")
        check_lengths(self._images, self._labels)
        super().__init__(len(self._images), *options)

    def _read(self, epoch, numbers):
        for mine, _ in numbers:
            yield self._images[mine], self._labels[mine]  # copies: who changes a batch does not change the data


def batches(images, labels, batch_size, shuffle=False, seed=0, last_batch="keep", rank=0, num_workers=1) -> Batches:
    """Cut images and labels into batches, as NumPy arrays on the host.

    Args:
        images: (N, ...) array.
        labels: (N, ...) array; row i belongs to image i.
        batch_size, shuffle, seed, last_batch, rank, num_workers: as for :class:`gluon_parallel.datasets.loader.Loader`.

    Returns:
        An iterable of (images, labels), new in every pass, with ``len()`` and ``set_epoch(epoch, start=0)``.

    Raises:
        BatchMismatch: there are no samples, images and labels differ in length, or an argument makes no sense.

    Example:
        >>> loader = batches(np.arange(5.0), np.arange(5), batch_size=2)
        >>> [labels.tolist() for images, labels in loader]
        [[0, 1], [2, 3], [4]]
        >>> loader.set_epoch(7, start=2)  # go on in the middle of an epoch
        >>> [labels.tolist() for images, labels in loader]
        [[4]]
    """
    return Batches(images, labels, batch_size, shuffle, seed, last_batch, rank, num_workers)


def check_lengths(samples, labels) -> None:
    """Refuse samples and labels of different number."""
    if len(samples) != len(labels):
        raise BatchMismatch(f"batches: {len(samples)} samples but {len(labels)} labels; each sample needs one label")


def _host(data, name) -> np.ndarray:
    """The data as a NumPy array that has a length."""
    array = data.asnumpy() if hasattr(data, "asnumpy") else np.asarray(data)  # an NDArray would be read one by one
    if array.ndim == 0:
        raise BatchMismatch(f"batches: {name} is a single {array.dtype} value; pass an array with one row per sample")
    return array


def _integer(name, value, least, below=None) -> int:
    """The value as an int, or an error that says what it should be."""
    wanted = f"at least {least}" if below is None else f"from {least} to {below - 1}"
    try:
        number = operator.index(value)
    except TypeError:
        raise BatchMismatch(f"batches: {name}={value!r} is not an integer; it has to be {wanted}") from None
    if number < least or (below is not None and number >= below):
        raise BatchMismatch(f"batches: {name}={value!r} is out of range; it has to be {wanted}")
    return number
