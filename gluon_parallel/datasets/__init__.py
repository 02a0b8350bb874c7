"""Images to train with, in memory: embedded digits, published data sets, and the batches that a step takes."""

from . import text as text
from .catalog import NAMES, load
from .dataset import Dataset, Part
from .loader import Batches, batches

__all__ = ["NAMES", "Batches", "Dataset", "Part", "batches", "load"]
