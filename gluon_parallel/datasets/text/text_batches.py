"""Batches of texts: a number for each frequent word, similar lengths together, shards of about as many tokens."""

import operator
import re
from collections import Counter
from collections.abc import Iterable
from typing import Optional

import numpy as np

from ...mxnet.compat import mx  # noqa: F401 - for the doctest
from ...split import as_devices, map_arrays, split_and_load
from ..loader import Loader, check_lengths
from ..samples import padded

PADDING, UNKNOWN = 0, 1
_TOKEN = re.compile(r"\w+(?:'\w+)?|[^\w\s]")


def tokenize(text: str) -> list[str]:
    """Words in small letters, and marks by themselves.

    Example:
        >>> tokenize("Don't panic, it's 42!")
        ["don't", 'panic', ',', "it's", '42', '!']
    """
    return _TOKEN.findall(text.lower())


class Vocabulary:
    """The words that have a number.

    Args:
        texts: those to train with, and no others: what only the test knows shall stay unknown.
        max_size: how many numbers there are at most; the most frequent words get them.

    Example:
        >>> vocabulary = Vocabulary(["the cat and the dog"], max_size=4)
        >>> len(vocabulary), vocabulary.encode("the dog barks").tolist()
        (4, [2, 1, 1])
    """

    def __init__(self, texts: Iterable[str], max_size: int = 20000) -> None:
        if max_size < 3:
            raise ValueError(f"Vocabulary: max_size={max_size} leaves no number for a word; wanted at least 3")
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(tokenize(text))
        frequent = sorted(counts, key=lambda word: (-counts[word], word))
        self.words = ("<pad>", "<unk>", *frequent[: max_size - 2])
        self._numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str, max_length: Optional[int] = None) -> np.ndarray:
        """The numbers of a text's words, (T,) int32, cut after `max_length`; an empty text is one unknown word."""
        words = tokenize(text)[:max_length]
        return np.array([self._numbers.get(word, UNKNOWN) for word in words] or [UNKNOWN], np.int32)


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

    def _global_batches(self, random):
        """Texts of similar length go together, among as many as `pool` batches hold."""
        batches = super()._global_batches(random)
        if not self._shuffle:
            return batches
        chosen = []
        for first in range(0, len(batches), self._pool):
            part = np.concatenate(batches[first : first + self._pool])
            chosen += self._in_batches(part[np.argsort(self._lengths[part], kind="stable")])
        return [chosen[index] for index in random.permutation(len(chosen))]

    def _read(self, epoch, numbers):
        for mine, samples in numbers:
            # All workers pad alike, so that they compute equally long.
            longest = -(-self._lengths[samples].max() // self._multiple) * self._multiple
            tokens = padded([self._texts[index] for index in mine], (longest,), PADDING, np.int32)
            # MXNet's sequence operators want lengths as floats.
            yield (tokens, self._lengths[mine].astype(np.float32)), self._labels[mine]


def shard_ends(lengths, num_shards: int) -> list[int]:
    """The ends of at most `num_shards` shards of texts, sorted from long to short, of which the largest costs least.

    A shard costs its number of texts times the length of its longest one, for that is what its device computes.
    """

    def ends(most):
        found, at = [], 0
        while at < len(lengths):
            at = min(len(lengths), at + max(1, most // int(lengths[at])))
            found.append(at)
        return found

    low, high = int(lengths[0]), int(lengths[0]) * len(lengths)
    while low < high:
        middle = (low + high) // 2
        if len(ends(middle)) <= num_shards:
            high = middle
        else:
            low = middle + 1
    return ends(low)


def split_by_tokens(data, devices) -> list:
    """Cut a batch of texts so that every device computes about the same number of tokens.

    Long texts go to one device and short ones to another, each shard padded only to its own longest text. Pass it
    as ``gp.DataParallel(..., split=gp.datasets.text.split_by_tokens)``; the gradient is the same as with any split.

    Args:
        data: ``((tokens, lengths), labels)``: (N, T), (N,) and (N,), or more arrays beside the labels.
        devices: list of ``mx.Context``.

    Returns:
        One shard per device, nested like `data`; fewer where there are fewer texts.

    Example:
        >>> tokens, lengths = np.ones((3, 8), int), np.array([2, 8, 2])
        >>> shards = split_by_tokens(((tokens, lengths), np.array([0, 1, 0])), [mx.cpu(0), mx.cpu(1)])
        >>> [shard[0][0].shape for shard in shards]
        [(1, 8), (2, 2)]
    """
    (tokens, lengths), labels = data
    devices = as_devices(devices)
    tokens, lengths = np.asarray(tokens), np.asarray(lengths)
    labels = map_arrays(np.asarray, labels)
    order = np.argsort(-lengths, kind="stable")
    shards, start = [], 0
    for end, device in zip(shard_ends(lengths[order], len(devices)), devices):
        chosen = order[start:end]
        longest = int(lengths[chosen].max())
        own_labels = map_arrays(operator.itemgetter(chosen), labels)
        shards += split_and_load(((tokens[chosen, :longest], lengths[chosen]), own_labels), [device])
        start = end
    return shards
