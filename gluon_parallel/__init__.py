"""Data-parallel training for MXNet/Gluon that is exact, fast and hard to get wrong.

Import this package before MXNet: it makes MXNet 1.9.1 run on today's Python and NumPy.
"""

# ruff: noqa: E402
from .commands.doctor import run_if_asked as _run_doctor_if_asked  # isort: skip

_run_doctor_if_asked()  # and exit, before anything is imported that may fail

from . import compat as compat  # isort: skip  (first: from here on `import mxnet` works)
from . import archive as archive
from . import asynchronous as asynchronous
from . import datasets as datasets
from . import errors as errors
from . import kvstore as kvstore
from . import launch as launch
from . import metrics as metrics
from . import models as models
from . import nn as nn
from . import pipeline as pipeline
from .allreduce import allreduce, average_gradients, broadcast
from .data_parallel import DataParallel, set_precision
from .data_parallel import sampler as sampler
from .data_parallel.replicas import check_replicas
from .device_threads import parallel_apply
from .devices import devices
from .metrics import evaluate
from .pipeline import Pipeline
from .split import num_samples, shard_sizes, split_and_load
from .training import checkpoint as checkpoint
from .training import config as config
from .training import entry as entry
from .training import pictures as pictures
from .training import runs as runs
from .training.prepare import Training, prepare
from .training.seeding import reseed

__version__ = "0.1.0"

__all__ = [
    "DataParallel",
    "Pipeline",
    "Training",
    "allreduce",
    "average_gradients",
    "broadcast",
    "check_replicas",
    "devices",
    "errors",
    "evaluate",
    "num_samples",
    "parallel_apply",
    "prepare",
    "reseed",
    "set_precision",
    "shard_sizes",
    "split_and_load",
]

compat.serve()  # a process that shall be a server of MXNet ends here
