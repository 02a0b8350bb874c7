"""What the import of this package replaces in MXNet, in this order; the page architecture.md lists the rest too."""

import multiprocessing.pool
from typing import Any, NamedTuple

from .allreduce import gradients, written
from .datasets import folders
from .environment import launched_group
from .kvstore import clients, factory, separate_training, trainer_parameters
from .mxnet import last_error
from .mxnet.compat import mx
from .mxnet.compat.replacing import stands_for
from .nn import convert, executor, frozen_weights
from .reduce import nag
from .step import module_loops, trainer_loops
from .training import worker_pools
from .training.checkpoint.files import load_arrays, load_states

_trainer, _module = mx.gluon.Trainer, mx.mod.Module


class Patch(NamedTuple):
    """An attribute of MXNet, and the object that replaces or wraps it."""

    owner: Any  # module or class
    name: str
    ours: Any  # function, or a property


REPLACEMENTS = [  # called with the same arguments
    Patch(mx.kvstore, "create", factory.create),
    Patch(mx.gluon.Parameter, "__getstate__", gradients.copied),  # which MXNet has not
    Patch(mx.gluon.Parameter, "__setstate__", gradients.restore),  # nor this
    Patch(mx.gluon.Parameter, "grad_req", gradients.grad_req),
    Patch(mx.nd, "CachedOp", executor.CachedOp),  # where Gluon's blocks look it up when they build a graph
]
# Called as wrapper(function, *arguments): with MXNet's names of them, since callers may write these.
WRAPPERS = [
    Patch(mx.base, "get_last_ffi_error", last_error.explain),
    Patch(mx.gluon.HybridBlock, "_build_cache", executor.build_cache),
    Patch(mx.gluon.Parameter, "initialize", executor.initialize),
    Patch(mx.nd, "FullyConnected", frozen_weights.fully_connected),
    Patch(mx.nd.op, "FullyConnected", frozen_weights.fully_connected),
    Patch(mx.nd.numpy_extension, "fully_connected", frozen_weights.fully_connected),
    Patch(mx.npx, "fully_connected", frozen_weights.fully_connected),
    Patch(mx.sym.Symbol, "simple_bind", frozen_weights.bind),
    Patch(mx.sym.Symbol, "bind", frozen_weights.bind),
    Patch(mx.optimizer.optimizer, "nag_mom_update", nag.update),  # the name that NAG calls
    Patch(mx.gluon.contrib.nn.SyncBatchNorm, "hybrid_forward", convert.warn_of_contrib),
    Patch(mx.gluon.data.vision.ImageFolderDataset, "__init__", folders.say_what_is_there),
    Patch(mx.image, "imread", folders.name_file),
    Patch(mx.nd, "load", load_arrays),
    Patch(mx.npx, "load", load_arrays),
    Patch(mx.gluon.Parameter, "set_data", written.set_data),
    Patch(mx.gluon.Parameter, "_init_grad", gradients.register),
    Patch(mx.gluon.Parameter, "cast", gradients.register),
    Patch(mx.gluon.Parameter, "zero_grad", gradients.set_to_zero),
    Patch(mx.gluon.ParameterDict, "zero_grad", gradients.set_to_zero),
    Patch(mx.gluon.utils, "clip_global_norm", gradients.clip_global_norm),
    Patch(mx.gluon.trainer, "_create_kvstore", clients.create_store),
    Patch(mx.model, "_create_kvstore", clients.create_modules_store),
    Patch(mx.mod.module, "_create_kvstore", clients.create_modules_store),
    Patch(mx.model, "_update_params", module_loops.update_params),
    Patch(mx.mod.module, "_update_params", module_loops.update_params),
    Patch(_trainer, "_reset_kvstore", trainer_parameters.reset_store),
    Patch(_trainer, "_init_params", clients.init_params),
    Patch(_trainer, "_init_kvstore", clients.init_kvstore),
    Patch(_module, "init_optimizer", clients.init_optimizer),
    Patch(_module, "load_optimizer_states", module_loops.load_states),
    Patch(_trainer, "load_states", load_states),
    Patch(_trainer, "step", trainer_loops.step),
    Patch(_trainer, "_allreduce_grads", trainer_loops.allreduce_grads),
    Patch(_trainer, "_update", trainer_loops.update),
]
WRAPPERS_IN_GROUPS = [  # only in processes that were started as a group, for their first backward passes
    Patch(mx.autograd, "backward", separate_training.count_backward),
    Patch(mx.nd.NDArray, "backward", separate_training.count_backward),
]
WRAPPERS_OF_PYTHON = [Patch(multiprocessing.pool.Pool, "__init__", worker_pools.make)]


def _wrapped(owner, name, wrapper):
    function = getattr(owner, name)

    @stands_for(function, owner, name)
    def call(*args, **kwargs):
        return wrapper(function, *args, **kwargs)

    vars(call)["wrapper"] = wrapper
    return call


def apply():
    """Apply all patches. The end of the package's import calls it, once: a second call would wrap twice."""
    for owner, name, ours in REPLACEMENTS:
        setattr(owner, name, ours)
    in_groups = WRAPPERS_IN_GROUPS if launched_group() is not None else []
    for owner, name, ours in WRAPPERS + in_groups + WRAPPERS_OF_PYTHON:
        setattr(owner, name, _wrapped(owner, name, ours))
