"""Data sets, embedded and published, with labels, boxes or masks, and their batches."""

from . import coco as coco
from . import detection as detection
from . import pictures as pictures
from . import scenes as scenes
from . import segmentation as segmentation
from . import text as text
from . import voc as voc
from .catalog import NAMES, load
from .dataset import Dataset, Part
from .loader import Batches, batches

__all__ = ["NAMES", "Batches", "Dataset", "Part", "batches", "load"]
