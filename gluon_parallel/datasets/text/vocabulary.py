"""Vocabulary: a number for each frequent word of the training texts, one for all others, one for padding."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Optional

import numpy as np

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
