"""Texts: data sets by name (`catalog`), vocabulary, padded batches, and their split over devices."""

from ..dataset import Texts as Texts
from .catalog import NAMES as NAMES
from .catalog import load as load
from .text_batches import PADDING as PADDING
from .text_batches import UNKNOWN as UNKNOWN
from .text_batches import TextBatches
from .text_batches import Vocabulary as Vocabulary
from .text_batches import split_by_tokens as split_by_tokens
from .text_batches import tokenize as tokenize

batches = TextBatches
