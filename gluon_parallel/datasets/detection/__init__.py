"""Images with boxes on their way to a net: altered at random, and put into batches."""

from .batching import batches, pad
from .catalog import NAMES, Task, load
from .transforms import compose, crop, flip, resize, resize_to, without_difficult

__all__ = [
    "NAMES",
    "Task",
    "batches",
    "compose",
    "crop",
    "flip",
    "load",
    "pad",
    "resize",
    "resize_to",
    "without_difficult",
]
