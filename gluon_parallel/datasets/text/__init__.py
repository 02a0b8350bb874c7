"""Text data: an embedded set in which order matters, AG News, IMDB, and padded batches."""

from .catalog import NAMES, load
from .dataset import TextDataset, Texts
from .padding import TextBatches, batches
from .split_by_tokens import split_by_tokens
from .vocabulary import PADDING, UNKNOWN, Vocabulary, tokenize

__all__ = [
    "NAMES",
    "PADDING",
    "UNKNOWN",
    "TextBatches",
    "TextDataset",
    "Texts",
    "Vocabulary",
    "batches",
    "load",
    "split_by_tokens",
    "tokenize",
]
