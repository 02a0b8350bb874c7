"""Segmentation data: random transforms and batches of images with masks."""

from .batching import batches
from .catalog import NAMES, Task, load
from .transforms import compose, crop, flip, resize

__all__ = ["NAMES", "Task", "batches", "compose", "crop", "flip", "load", "resize"]
