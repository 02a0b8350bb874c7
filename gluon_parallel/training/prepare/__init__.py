"""`prepare` connects a training script with the processes and devices that it runs on."""

from .connect import prepare as prepare
from .loop import Loop as Loop
from .training import Training as Training
