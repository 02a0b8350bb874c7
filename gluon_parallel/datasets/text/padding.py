"""Batches of texts of similar length, padded at the end; reproducible by seed and epoch."""

import numpy as np

from ..loader import Loader, check_lengths
from ..samples import padded
from .vocabulary import PADDING


class TextBatches(Loader):
    """Padded batches ``((tokens, lengths), labels)`` of encoded texts, new in every pass; ``gp.datasets.text.batches``.

    They are (B, T) int32, (B,) float32 and (B,) int32.

    Args:
        texts: (T,) integers each, see :class:`Vocabulary`.
        labels: one per text.
        batch_size, seed, rank, num_workers: as for :class:`gluon_parallel.sampler.BatchSampler`.
        shuffle: take texts in an order that follows from `seed` and the epoch alone, similar lengths together.
        pool: from how many batches' texts similar lengths are chosen: more pad less, fewer mix better.
        multiple: lengths are rounded up to a multiple, so that fewer different shapes occur.

    Raises:
        BatchMismatch: there are no texts, not as many labels, or an argument makes no sense.

    Example:
        >>> loader = TextBatches([np.array([3]), np.array([4, 5]), np.array([6])], [0, 1, 0], batch_size=2, multiple=1)
        >>> [tokens.tolist() for (tokens, lengths), labels in loader]
        [[[3, 0], [4, 5]], [[6]]]
    """

    def __init__(
        self, texts, labels, batch_size, shuffle=False, seed=0, pool=20, multiple=4, rank=0, num_workers=1
    ) -> None:
        check_lengths(texts, labels)
        super().__init__(len(texts), batch_size, rank, num_workers, shuffle, seed)
        self._texts, self._labels = list(texts), np.asarray(labels, np.int32)
        self._lengths = np.array([len(text) for text in self._texts])
        self._pool, self._multiple = pool, multiple

    def _cut(self, random):
        """Texts of similar length go together, among as many as `pool` batches hold."""
        batches = super()._cut(random)
        if not self._shuffle:
            return batches
        chosen = []
        for first in range(0, len(batches), self._pool):
            part = np.concatenate(batches[first : first + self._pool])
            chosen += self._slices(part[np.argsort(self._lengths[part], kind="stable")])
        return [chosen[index] for index in random.permutation(len(chosen))]

    def _read(self, epoch, numbers):
        for mine, samples in numbers:
            # All workers pad alike, so that they compute equally long.
            longest = -(-self._lengths[samples].max() // self._multiple) * self._multiple
            tokens = padded([self._texts[index] for index in mine], (longest,), PADDING, np.int32)
            # MXNet's sequence operators want lengths as floats.
            yield (tokens, self._lengths[mine].astype(np.float32)), self._labels[mine]
