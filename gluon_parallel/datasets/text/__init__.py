"""Text data: an embedded set in which order matters, AG News, IMDB, and padded batches."""

from .catalog import NAMES, load
from .padding import TextBatches, batches
from .split_by_tokens import split_by_tokens
from .texts import Texts
from .vocabulary import PADDING, UNKNOWN, Vocabulary, tokenize

__all__ = [
    "NAMES",
    "PADDING",
    "UNKNOWN",
    "TextBatches",
    "Texts",
    "Vocabulary",
    "batches",
    "load",
    "split_by_tokens",
    "tokenize",
]
