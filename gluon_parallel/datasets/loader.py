"""Batches of images and labels in memory: the same for the same seed, epoch and batch number."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator

import numpy as np

from .. import split
from ..errors import BatchMismatch
from ..kvstore import separate_training

LAST_BATCH = ("keep", "discard")  # Gluon's words
_SEEDS = 2**32  # what NumPy's RandomState accepts


class Batches:
    """A pass over the data each time it is iterated; made by :func:`batches`.

    Attributes:
        epoch: of the next pass. A pass that ran to its end moves it on by one, so that no two passes are alike.
        start: the batch that the next pass begins with.
    """

    def __init__(self, images, labels, batch_size, shuffle, seed, last_batch, rank, num_workers):
        self._images = _host(images, "images")
        self._labels = _host(labels, "labels")
        self._size = _integer("batch_size", batch_size, least=1)
        self._workers = _integer("num_workers", num_workers, least=1)
        self._rank = _integer("rank", rank, least=0, below=self._workers)
        self._seed = _integer("seed", seed, least=0, below=_SEEDS)
        self._shuffle = shuffle
        if len(self._images) != len(self._labels):
            raise BatchMismatch(
                f"batches: {len(self._images)} images but {len(self._labels)} labels; each image needs one label"
            )
        if len(self._images) == 0:
            raise BatchMismatch("batches: no images at all; pass at least one image with its label")
        if last_batch not in LAST_BATCH:
            raise BatchMismatch(f"batches: last_batch={last_batch!r} is none of {', '.join(map(repr, LAST_BATCH))}")
        together = self._together = self._size * self._workers  # samples that all workers see between two updates
        whole, rest = divmod(len(self._images), together)
        self._num_batches = whole + (rest > 0 and last_batch == "keep")
        if self._num_batches == 0:
            raise BatchMismatch(
                f"batches: {len(self._images)} samples do not fill one batch of {together} "
                f"(batch_size {self._size} x num_workers {self._workers}), and last_batch='discard' drops the rest; "
                "take smaller batches or last_batch='keep'"
            )
        self.epoch = 0
        self.start = 0
        separate_training.note("the sampler", self._workers > 1, separate_training.WHOLE_DATA)

    def __len__(self) -> int:
        """The number of batches in a whole epoch, on every worker, whatever `start` is."""
        return self._num_batches

    def share(self, rank: int, num_workers: int) -> Batches:
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

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        # Not a generator itself: epoch and start are those of the moment when the pass begins, not of its first batch.
        return self._pass(self.epoch, self.start)

    def _pass(self, epoch, start):
        order = np.arange(len(self._images))
        if self._shuffle:
            # NumPy has frozen the stream of RandomState, so an epoch can be resumed under another version of NumPy.
            order = np.random.RandomState([self._seed, epoch]).permutation(order)
        together = self._together
        for number in range(start, self._num_batches):
            samples = order[number * together : (number + 1) * together]
            first, stop = split.share(len(samples), self._rank, self._workers)
            mine = samples[first:stop]
            yield self._images[mine], self._labels[mine]  # copies: who changes a batch does not change the data
        self.set_epoch((epoch + 1) % _SEEDS)


def batches(images, labels, batch_size, shuffle=False, seed=0, last_batch="keep", rank=0, num_workers=1) -> Batches:
    """Cut images and labels into batches, as NumPy arrays on the host.

    Args:
        images: (N, ...) array.
        labels: (N, ...) array; row i belongs to image i.
        batch_size: samples per batch and worker.
        shuffle: take the samples in an order that follows from `seed` and the epoch alone.
        seed: from 0 to 2**32 - 1.
        last_batch: "keep" a last batch that is smaller, or "discard" it.
        rank: this worker's number, from 0.
        num_workers: how many workers share the data. Their batches of the same number together are the batch that one
            worker alone would get with ``batch_size * num_workers``; so all have the same number of batches, and only
            of a last batch that is smaller than `num_workers` the share of some is empty.

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
