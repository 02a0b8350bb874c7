"""Batches of texts of similar length, padded at the end; the same for the same seed and epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ...errors import BatchMismatch
from ...split import share
from .vocabulary import PADDING


def pad(texts: Sequence[np.ndarray], multiple: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Put texts of unequal lengths into one array.

    Args:
        texts: (T,) integers each.
        multiple: the common length is a multiple of this, so that fewer different shapes occur.

    Returns:
        Tokens (N, T) int32, and lengths (N,) float32 (MXNet's sequence operators want them as floats).

    Example:
        >>> tokens, lengths = pad([np.array([5]), np.array([6, 7, 8])])
        >>> tokens.tolist(), lengths.tolist()
        ([[5, 0, 0], [6, 7, 8]], [1.0, 3.0])
    """
    lengths = np.array([len(text) for text in texts], np.float32)
    longest = -(-int(lengths.max()) // multiple) * multiple
    tokens = np.full((len(texts), longest), PADDING, np.int32)
    for row, text in zip(tokens, texts):
        row[: len(text)] = text
    return tokens, lengths


class TextBatches:
    """A pass over the texts each time it is iterated; made by :func:`batches`.

    Attributes:
        epoch: of the next pass. A pass that ran to its end moves it on by one.
        start: the batch that the next pass begins with.
    """

    def __init__(self, texts, labels, batch_size, shuffle, seed, pool, multiple, rank, num_workers):
        if len(texts) != len(labels) or len(texts) == 0:
            raise BatchMismatch(f"text.batches: {len(texts)} texts and {len(labels)} labels; each text needs one label")
        if batch_size < 1 or not 0 <= rank < num_workers:
            raise BatchMismatch(f"text.batches: batch_size={batch_size}, rank={rank} of {num_workers} make no sense")
        self._texts, self._labels = list(texts), np.asarray(labels, np.int32)
        self._lengths = np.array([len(text) for text in self._texts])
        self._size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._pool, self._multiple = pool, multiple
        self._rank, self._workers = rank, num_workers
        self.epoch = self.start = 0

    def __len__(self) -> int:
        """The number of batches in a whole epoch."""
        return math.ceil(len(self._texts) / (self._size * self._workers))

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the next pass: which epoch's order, and which batch of it comes first."""
        if epoch < 0 or not 0 <= start <= len(self):
            raise BatchMismatch(f"text.batches: epoch={epoch}, start={start} of {len(self)} batches is out of range")
        self.epoch, self.start = epoch, start

    def __iter__(self) -> Iterator[tuple[tuple[np.ndarray, np.ndarray], np.ndarray]]:
        return self._pass(self.epoch, self.start)

    def _batches(self, epoch):
        """Which texts go together: those of similar length, among as many as `pool` batches hold."""
        together = self._size * self._workers
        order = np.arange(len(self._texts))
        if not self._shuffle:
            return [order[first : first + together] for first in range(0, len(order), together)]
        random = np.random.RandomState([self._seed, epoch])  # NumPy has frozen its stream
        order = random.permutation(order)
        chosen = []
        for first in range(0, len(order), together * self._pool):
            part = order[first : first + together * self._pool]
            part = part[np.argsort(self._lengths[part], kind="stable")]
            chosen += [part[at : at + together] for at in range(0, len(part), together)]
        return [chosen[index] for index in random.permutation(len(chosen))]

    def _pass(self, epoch, start):
        for samples in self._batches(epoch)[start:]:
            first, stop = share(len(samples), self._rank, self._workers)
            # All workers pad alike, so that they compute equally long.
            longest = int(self._lengths[samples].max())
            tokens, lengths = pad([*(self._texts[index] for index in samples[first:stop]), np.zeros(longest, int)],
                                  self._multiple)  # fmt: skip
            yield (tokens[:-1], lengths[:-1]), self._labels[samples[first:stop]]
        self.set_epoch(epoch + 1)


def batches(
    texts, labels, batch_size, shuffle=False, seed=0, pool=20, multiple=4, rank=0, num_workers=1
) -> TextBatches:
    """Cut encoded texts into padded batches.

    Args:
        texts: (T,) integers each, see :class:`Vocabulary`.
        labels: one per text.
        batch_size: texts per batch and worker.
        shuffle: take texts in an order that follows from `seed` and the epoch alone, similar lengths together.
        seed: from 0 to 2**32 - 1.
        pool: from how many batches' texts similar lengths are chosen: more pad less, fewer mix better.
        multiple: lengths are rounded up to a multiple, so that fewer different shapes occur.
        rank, num_workers: as for :func:`gluon_parallel.datasets.batches`.

    Returns:
        An iterable of ``((tokens, lengths), labels)``, new in every pass, with ``len()`` and ``set_epoch``.

    Raises:
        BatchMismatch: there are no texts, not as many labels, or an argument makes no sense.

    Example:
        >>> loader = batches([np.array([3]), np.array([4, 5]), np.array([6])], [0, 1, 0], batch_size=2, multiple=1)
        >>> [tokens.tolist() for (tokens, lengths), labels in loader]
        [[[3, 0], [4, 5]], [[6]]]
    """
    return TextBatches(texts, labels, batch_size, shuffle, seed, pool, multiple, rank, num_workers)
