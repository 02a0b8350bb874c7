"""Texts: data sets by name (`catalog`), vocabulary, padded batches, and their split over devices."""

from ..dataset import Texts as Texts
from .catalog import NAMES as NAMES
from .catalog import load as load
from .text_batches import TextBatches
from .text_batches import split_by_tokens as split_by_tokens
from .vocabulary import PADDING as PADDING
from .vocabulary import UNKNOWN as UNKNOWN
from .vocabulary import Vocabulary as Vocabulary
from .vocabulary import tokenize as tokenize

batches = TextBatches
