"""One synchronous data-parallel training step, exact for shards of any size."""

from .precision import active_precision as active_precision
from .precision import set_precision as set_precision
from .step import DataParallel as DataParallel
