"""Patches of ``gluon.Trainer`` and ``mx.mod.Module``, so that both use this package's stores.

MXNet leaves a store out for one device unless its name begins with "dist". For other stores its Module divides the
gradients' sum by this process's samples alone, and starts each process from weights of its own.
"""

import functools
import warnings

from ..compat import mx
from . import separate_training
from .base import Store
from .factory import OURS, known_name


def open_named(name_or_store):
    """The store of that name if it is one of this package's, or ``auto``; anything else as it is."""
    if isinstance(name_or_store, str) and name_or_store.lower() in ("auto", *OURS):
        return mx.kv.create(name_or_store)
    return name_or_store


def _with_our_stores(client, create, named):
    """MXNet's function that makes a `client`'s store, which then compares what all processes will send."""

    @functools.wraps(create)
    def create_store(kvstore, num_device, arg_params):
        name = known_name(kvstore) if isinstance(kvstore, str) else kvstore
        store, update_on_store = create(open_named(name), num_device, arg_params)
        separate_training.note(
            client,
            store is not None and store.num_workers > 1,
            "updates the weights of this process by its own gradients alone (write kvstore=store)",
            each=True,
        )
        if hasattr(store, "compare"):  # now: a server that runs an optimizer can compare nothing any more
            store.compare(list(arg_params) if named else range(len(arg_params)), list(arg_params.values()))
        return store, update_on_store

    return create_store


_init_in_mxnet = mx.mod.Module.init_optimizer


@functools.wraps(_init_in_mxnet)
def _init_optimizer(
    self, kvstore="local", optimizer="sgd", optimizer_params=(("learning_rate", 0.01),), force_init=False
):
    kvstore = open_named(kvstore)
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


mx.gluon.trainer._create_kvstore = _with_our_stores("gluon.Trainer", mx.gluon.trainer._create_kvstore, named=False)
mx.model._create_kvstore = _with_our_stores("mx.mod.Module", mx.model._create_kvstore, named=True)
mx.mod.module._create_kvstore = mx.model._create_kvstore
mx.mod.Module.init_optimizer = _init_optimizer
