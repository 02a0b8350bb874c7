"""`prepare` connects a training script with the processes and devices that it runs on."""

from .loop import Loop as Loop
from .survival import survive as survive
from .training import Training as Training
from .training import prepare as prepare
