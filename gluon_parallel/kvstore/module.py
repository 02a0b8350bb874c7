"""``mx.mod.Module`` over this package's stores: the same initial weights everywhere, and the mean over all samples.

MXNet's Module knows the stores ``dist_...`` by their name: for others it leaves the store out on one device, divides
the gradients' sum by this process's samples alone, and starts each process from weights of its own.
"""

from __future__ import annotations

import functools
import warnings

from ..compat import mx
from . import connected
from .base import Store


def opened(name_or_store):
    """The store of that name if it is one of this package's, or ``auto``; anything else as it is."""
    if isinstance(name_or_store, str) and name_or_store.lower() in ("auto", "mpi", "horovod"):
        return mx.kv.create(name_or_store)
    return name_or_store


_create_in_mxnet = mx.model._create_kvstore


@functools.wraps(_create_in_mxnet)
def _create_kvstore(kvstore, num_device, arg_params):
    store, update_on_store = _create_in_mxnet(opened(kvstore), num_device, arg_params)
    connected.note(
        "mx.mod.Module",
        store is not None and store.num_workers > 1,
        "updates the weights of this process by its own gradients alone (write kvstore=store)",
        each=True,
    )
    if hasattr(store, "compare"):  # now: a server that runs an optimizer can compare nothing any more
        store.compare(list(arg_params), list(arg_params.values()))
    return store, update_on_store


_init_in_mxnet = mx.mod.Module.init_optimizer


@functools.wraps(_init_in_mxnet)
def _init_optimizer(
    self, kvstore="local", optimizer="sgd", optimizer_params=(("learning_rate", 0.01),), force_init=False
):
    kvstore = opened(kvstore)
    if not isinstance(kvstore, Store) or (self.optimizer_initialized and not force_init):
        _init_in_mxnet(self, kvstore, optimizer, optimizer_params, force_init)
        return
    optimizer_params = dict(optimizer_params)
    optimizer_params.setdefault("rescale_grad", 1.0 / (self._exec_group.batch_size * kvstore.num_workers))
    if isinstance(optimizer, mx.optimizer.Optimizer) and kvstore.num_workers > 1:
        wanted = optimizer_params["rescale_grad"]
        if optimizer.rescale_grad != wanted:
            raise ValueError(
                f"store {kvstore.type!r}: the optimizer was made with rescale_grad={optimizer.rescale_grad:g}, and the "
                f"mean over the samples of all {kvstore.num_workers} processes takes {wanted:g}. Make it with "
                "rescale_grad=1 / (batch_size * store.num_workers), or name it: optimizer='sgd'"
            )
    with warnings.catch_warnings():  # MXNet compares with the mean over this process's samples
        warnings.filterwarnings("ignore", "Optimizer created manually outside Module", UserWarning)
        _init_in_mxnet(self, kvstore, optimizer, optimizer_params, force_init)
    for name, copies in zip(self._param_names, self._exec_group.param_arrays):
        kvstore.broadcast(name, self._arg_params[name], [self._arg_params[name], *copies])


mx.mod.module._create_kvstore = mx.model._create_kvstore = _create_kvstore
mx.mod.Module.init_optimizer = _init_optimizer
