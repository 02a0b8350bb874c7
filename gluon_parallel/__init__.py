"""Data-parallel training for MXNet and Gluon.

Import this package before MXNet: it makes MXNet 1.9.1 run on today's Python and NumPy.
"""

# ruff: noqa: E402
__version__ = "0.1.0"

from .commands import cli as _cli

_cli.run_if_asked()  # and exits: doctor, launch and --help do without what follows

from . import archive as archive
from . import asynchronous as asynchronous
from . import communication_hooks as communication_hooks
from . import datasets as datasets
from . import errors as errors
from . import kvstore as kvstore
from . import launch as launch
from . import metrics as metrics
from . import models as models
from . import nn as nn
from . import patches as _patches
from . import pipeline as pipeline
from .allreduce import allreduce as allreduce
from .allreduce import average_gradients as average_gradients
from .allreduce import broadcast as broadcast
from .commands.profiling import profile as profile
from .devices import devices as devices
from .gather import gather as gather
from .kvstore.collective import broadcast_object as broadcast_object
from .metrics import evaluate as evaluate
from .mxnet import compat as _compat
from .mxnet.device_threads import parallel_apply as parallel_apply
from .pipeline import Pipeline as Pipeline
from .split import num_samples as num_samples
from .split import shard_sizes as shard_sizes
from .split import split_and_load as split_and_load
from .step import DataParallel as DataParallel
from .step import sampler as sampler
from .step import set_precision as set_precision
from .step.weight_checks import check_replicas as check_replicas
from .training import checkpoint as checkpoint
from .training import config as config
from .training import pictures as pictures
from .training.adamw import AdamW as AdamW
from .training.linear_scaling import LinearScalingScheduler as LinearScalingScheduler
from .training.moving_average import ExponentialMovingAverage as ExponentialMovingAverage
from .training.prepare import Loop as Loop
from .training.prepare import Training as Training
from .training.prepare import prepare as prepare
from .training.prepare import survive as survive
from .training.run import Run as Run
from .training.seeding import reseed as reseed
from .training.start import start as start

# Modules that the imports above leave here; dir() shows the public API alone.
_INSIDE = """
    bounds commands cores device_names environment forks launch_engines launcher leftovers loss_checks mxnet
    native patches reduce sample_loss split step store_table training
""".split()


def __dir__() -> list[str]:
    return [name for name in globals() if not name.startswith("_") and name not in _INSIDE]


_patches.apply()
_compat.serve()  # a process that shall be a server of MXNet ends here
