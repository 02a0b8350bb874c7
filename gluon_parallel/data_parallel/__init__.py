"""One synchronous data-parallel training step, exact for shards of any size."""

from .step import DataParallel

__all__ = ["DataParallel"]
