"""One call that connects a training script of one's own with the processes and devices that it runs on."""

from .connect import prepare
from .training import Training

__all__ = ["Training", "prepare"]
