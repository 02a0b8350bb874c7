"""Pipeline parallelism: consecutive stages of a net on a device each, through which micro-batches flow."""

from .partition import Partition as Partition
from .partition import partition as partition
from .pipeline import Pipeline as Pipeline
from .profile import Profile as Profile
