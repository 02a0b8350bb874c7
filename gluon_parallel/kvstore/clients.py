"""Patches of ``gluon.Trainer`` and ``mx.mod.Module``, so that both use this package's stores.

MXNet leaves a store out for one device unless its name begins with "dist". For other stores its Module divides the
gradients' sum by this process's samples alone, and starts each process from weights of its own.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

from ..errors import CompressionFault, GradientUnavailable, warn
from ..mxnet.compat import mx
from ..mxnet.modules import batch_size_of_module, compression_of_module, copies_by_name, weights_by_name
from ..mxnet.optimizers import updater_in
from ..mxnet.trainers import (
    compression_of,
    has_made_store,
    has_sparse_gradients,
    has_sparse_weights,
    numbers_by_name,
    optimizer_of,
    parameters_of,
    set_compression,
    set_sparse_gradients,
    store_of,
    wait_for_store,
    waiting_for_store,
    want_store,
    wanted_store,
    wants_update_on_store,
)
from . import separate_training
from .base import Store
from .contract import is_distributed, is_ours
from .factory import connects_processes, known_name
from .handshake import ONE_DIVISOR, agree, compare, divided_by
from .protocols import CompressedSums, Groups, SparseSums, offers
from .servers import Servers
from .trainer_parameters import follow_parameters, keep_states


def open_named(name_or_store: Any) -> Any:
    """The store of that name if it is one of this package's, or ``auto``; anything else as it is."""
    lower = name_or_store.lower() if isinstance(name_or_store, str) else "dist"
    if connects_processes(lower) and not lower.startswith("dist"):
        return mx.kv.create(name_or_store)
    return name_or_store


def create_store(
    create: Callable[..., tuple[Any, bool]],
    kvstore: Any,
    num_device: int,
    arg_params: Mapping[str, Any],
    *,
    client: str = "gluon.Trainer",
    named: bool = False,
) -> tuple[Any, bool]:
    """Make the store of a `client`, which then compares what all processes will send under numbers, or names.

    A store within this process does not update unless the caller says so: the weights are those on the devices, which
    the caller, another trainer, or a file that is loaded may change.
    """
    name = known_name(kvstore) if isinstance(kvstore, str) else kvstore
    store, update_on_store = create(open_named(name), num_device, arg_params)
    separate_training.note(
        client,
        is_distributed(store),
        "updates the weights of this process by its own gradients alone (write kvstore=store)",
        each=True,
    )
    # Now: a server that runs an optimizer can compare nothing any more.
    if is_ours(store):  # another may not be able to sum
        compare(store, list(arg_params) if named else range(len(arg_params)), list(arg_params.values()))
    return store, update_on_store and _keeps_weights(store, arg_params)


def _keeps_weights(store: Any, arg_params: Mapping[str, Any]) -> bool:
    """Whether a store updates weights of its own: MXNet's servers do, and a caller, or a row_sparse weight, may ask."""
    is_asked = "MXNET_UPDATE_ON_KVSTORE" in os.environ or updater_in(store) is not None
    return is_asked or "dist" in store.type or any(array.stype != "default" for array in arg_params.values())


create_modules_store = functools.partial(create_store, client="mx.mod.Module", named=True)


def init_kvstore(init_in_mxnet: Callable[..., None], trainer: Any) -> None:
    """Make the store of a ``gluon.Trainer``, and warn where a single process asks for compression."""
    follow_parameters(trainer)
    if wants_update_on_store(trainer) is not False:
        _compare_on_servers(trainer)
    if has_sparse_gradients(trainer):
        store = want_store(trainer, open_named(wanted_store(trainer)))
        # Otherwise MXNet would refuse a store that is not its own.
        set_sparse_gradients(trainer, not offers(store, SparseSums))
    with _compressing_alone(trainer):
        init_in_mxnet(trainer)
    keep_states(trainer)
    parameters, store = compression_of(trainer), store_of(trainer)
    if offers(store, SparseSums):  # weights were compared, and do not say how gradients are stored
        sent = {number: one.list_grad() for number, one in enumerate(parameters_of(trainer)) if one.grad_req != "null"}
        compare(store, [*sent], [*sent.values()])
    is_alone = store is None or (offers(store, CompressedSums) and store.num_workers == 1)
    if is_alone and parameters and dict(parameters).get("type") != "none":
        warn(
            f"compression_params={parameters!r}: gradients are compressed between processes, and this process is "
            "alone, so they are not. For the same results over several processes, leave compression_params out",
            CompressionFault,
        )


@contextlib.contextmanager
def _compressing_alone(trainer: Any) -> Iterator[None]:
    """While MXNet makes the store of a trainer: one of ours compresses this trainer's gradients alone."""
    asked, store = compression_of(trainer), wanted_store(trainer)
    if asked:
        store = want_store(trainer, open_named(store))
    if not asked or not offers(store, CompressedSums):
        yield
        return
    store.set_gradient_compression(asked, trainer)
    set_compression(trainer, None)  # MXNet would have the store compress all that goes through it
    try:
        yield
    finally:
        set_compression(trainer, asked)


def init_params(init_in_mxnet: Callable[..., None], trainer: Any) -> None:
    """Give the store the parameters under their numbers, which MXNet asks for by name: two may have the same one."""
    names, waiting = numbers_by_name(trainer), waiting_for_store(trainer)
    if len(names) == len(parameters_of(trainer)):
        init_in_mxnet(trainer)
        return
    if has_sparse_weights(trainer):
        raise GradientUnavailable(
            "gluon.Trainer: two of its parameters have the same name, and rows of row_sparse weights are pulled by "
            "names; give the nets prefixes of their own, such as Dense(..., prefix='first_')"
        )
    left = []
    for number, parameter in enumerate(parameters_of(trainer)):
        if any(parameter is one for one in waiting):
            names[parameter.name] = number
            wait_for_store(trainer, [parameter])
            init_in_mxnet(trainer)
            left += waiting_for_store(trainer)
    wait_for_store(trainer, left)


def _compare_on_servers(trainer: Any) -> None:
    """Compare what the processes divide by, before each sends its optimizer: MXNet's servers take the last one."""
    store = wanted_store(trainer)
    if isinstance(store, str) and store.lower().startswith("dist"):
        store = want_store(trainer, mx.kv.create(store))  # MXNet opens it once
    if isinstance(store, Servers) and not store.is_asynchronous:
        agree(store, [divided_by(1 / optimizer_of(trainer).rescale_grad)], ONE_DIVISOR)


def init_optimizer(
    init_in_mxnet: Callable[..., None],
    module: Any,
    kvstore: Any = "local",
    optimizer: Any = "sgd",
    optimizer_params: Any = (("learning_rate", 0.01),),
    force_init: bool = False,
) -> None:
    """Make a Module's optimizer, which divides by the samples of all processes, and give all rank 0's weights."""
    kvstore = open_named(kvstore)
    if offers(kvstore, Groups) and compression_of_module(module):
        if force_init or not module.optimizer_initialized:  # others that go through this store did not ask for it
            kvstore = kvstore.subgroup(range(kvstore.num_workers))
    if not isinstance(kvstore, Store) or (module.optimizer_initialized and not force_init):
        init_in_mxnet(module, kvstore, optimizer, optimizer_params, force_init)
        return
    optimizer_params = dict(optimizer_params)
    optimizer_params.setdefault("rescale_grad", 1.0 / (batch_size_of_module(module) * kvstore.num_workers))
    divisor = divided_by(1 / optimizer_params["rescale_grad"])
    agree(kvstore, [divisor], "Bind the Module to one batch_size on all processes")
    if isinstance(optimizer, mx.optimizer.Optimizer) and kvstore.num_workers > 1:
        wanted = optimizer_params["rescale_grad"]
        if optimizer.rescale_grad != wanted:
            raise ValueError(
                f"store {kvstore.type!r}: the optimizer has rescale_grad={optimizer.rescale_grad:g}, and the mean over "
                f"all processes takes {wanted:g}: give it rescale_grad=1 / (batch_size * store.num_workers), or pass "
                "the optimizer's name"
            )
    with warnings.catch_warnings():  # MXNet compares with the mean over this process's samples
        warnings.filterwarnings("ignore", "Optimizer created manually outside Module", UserWarning)
        init_in_mxnet(module, kvstore, optimizer, optimizer_params, force_init)
    weights = weights_by_name(module)
    for name, copies in copies_by_name(module):
        kvstore.broadcast(name, weights[name], [weights[name], *copies])


def opened_store(trainer: Optional[mx.gluon.Trainer]) -> Any:
    """The trainer's store; opened here if the trainer has not started it. None: there is none."""
    if trainer is None:
        return None
    if has_made_store(trainer):
        return store_of(trainer)
    store = want_store(trainer, open_named(wanted_store(trainer)))
    if isinstance(store, str):
        return mx.kv.create(store) if connects_processes(store) else None
    return store
