"""Images with masks on their way to a net: altered at random, and put into batches."""

from .batching import batches
from .catalog import NAMES, Task, load
from .transforms import compose, crop, flip, resize

__all__ = ["NAMES", "Task", "batches", "compose", "crop", "flip", "load", "resize"]
