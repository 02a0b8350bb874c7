"""`prepare` connects a training script with the processes and devices that it runs on."""

from .connect import prepare
from .training import Training

__all__ = ["Training", "prepare"]
