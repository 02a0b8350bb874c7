"""One synchronous data-parallel training step, exact for shards of any size."""

from .precision import active_precision, set_precision
from .step import DataParallel

__all__ = ["DataParallel", "active_precision", "set_precision"]
