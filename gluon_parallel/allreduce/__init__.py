"""Sum, average or copy of the same arrays on all devices of this process, in place."""

from .copy_sums import CopySums as CopySums
from .copy_sums import sum_arrays as sum_arrays
from .copy_sums import sum_rows as sum_rows
from .functions import allreduce as allreduce
from .functions import allreduce_each as allreduce_each
from .functions import average_gradients as average_gradients
from .functions import broadcast as broadcast
