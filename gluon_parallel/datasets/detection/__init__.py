"""Detection data: random transforms and batches of images with boxes."""

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
