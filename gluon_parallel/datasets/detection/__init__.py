"""Detection data: random transforms and batches of images with boxes."""

from ..task import Task
from ..transforms import compose
from .batching import batches, pad
from .catalog import NAMES, load
from .transforms import crop, flip, resize, resize_to, without_difficult

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
