"""Segmentation data: random transforms and batches of images with masks."""

from ..task import Task
from ..transforms import compose
from .batching import batches
from .catalog import NAMES, load
from .transforms import crop, flip, resize

__all__ = ["NAMES", "Task", "batches", "compose", "crop", "flip", "load", "resize"]
