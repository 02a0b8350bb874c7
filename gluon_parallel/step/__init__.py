"""One synchronous data-parallel training step, exact for shards of any size."""

from .data_parallel import DataParallel as DataParallel
from .precision import active_precision as active_precision
from .precision import set_precision as set_precision
