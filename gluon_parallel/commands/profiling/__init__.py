"""Where a training step's time goes, per device and process: recorded, cut into parts, explained and drawn."""

from .session import Profile as Profile
from .session import profile as profile
