"""Where a training step's time goes, per device and process: recorded, cut into activities, explained and drawn."""

from .session import Session as Session
from .session import profile as profile
