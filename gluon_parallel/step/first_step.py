"""Preparation of the first step: the trainer's store (NCCL or our sums), and the same net on all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from .. import kvstore
from ..errors import GradientUnavailable
from ..kvstore.contract import contract
from ..kvstore.handshake import agree, signature
from ..kvstore.state import state_of
from ..kvstore.trainer_parameters import follow_parameters
from ..mxnet.blocks import parameters_by_structure
from ..mxnet.compat import mx
from ..mxnet.engine import make_plain
from ..mxnet.parameters import gradient_storage, has_values, waits_for_shape, weight_storage
from ..mxnet.trainers import (
    compression_of,
    devices_of,
    fill_store,
    has_made_store,
    make_store,
    parameters_of,
    store_of,
    updates_on_store,
    want_store,
    want_update_on_devices,
    wanted_store,
    wants_update_on_store,
)
from ..reduce import hooked_sum
from . import checks, trainer_loops
from .precision import refuse_unsupported

_SAME_ORDER = (
    "gluon.Trainer numbers parameters by their names. Make the same layers in the same order on every process, or name "
    "them (prefix='encoder_')"
)


def connect(
    net: mx.gluon.Block, trainer: mx.gluon.Trainer, devices: Sequence[mx.Context], hook: Any, accumulates: bool
) -> Any:
    """Have a trainer update on the devices, after sums by `hook`; refuse what it cannot train.

    Returns its store, its name, or None.
    """
    checks.refuse_sums(trainer)
    store = update_on_devices(trainer)
    hooked_sum.connect(trainer, hook, store)
    refuse_unsupported(net, trainer, devices, accumulates)
    return store


def update_on_devices(trainer: mx.gluon.Trainer) -> mx.kv.KVStoreBase | str | None:
    """Have the trainer update on the devices, not on its store; returns the store, its name, or None."""
    follow_parameters(trainer)
    wanted = wants_update_on_store(trainer)
    if updates_on_store(trainer) if has_made_store(trainer) else wanted:
        raise GradientUnavailable(
            "the trainer updates on its store, so gradients can neither be clipped nor weighted exactly; "
            "write gluon.Trainer(..., update_on_kvstore=False), or build DataParallel before the trainer's "
            "first step and before its state is saved or restored"
        )
    want_update_on_devices(trainer)
    trainer_loops.sum_over_devices(trainer)
    if has_made_store(trainer):
        return store_of(trainer)
    store = wanted_store(trainer)
    if kvstore.connects_processes(store):
        store = want_store(trainer, kvstore.create(store))  # the first step may have no samples
    if getattr(store, "type", store) in ("device", "local"):
        # Without NCCL `allreduce` does their work, with fewer copies.
        store = want_store(trainer, kvstore.create("nccl") if nccl_fits(trainer) else None)
    return store


def nccl_fits(trainer: mx.gluon.Trainer) -> bool:
    """Whether MXNet was built with NCCL, and NCCL can add the gradients of this process's GPUs as `allreduce` would."""
    return (
        mx.runtime.Features().is_enabled("NCCL")
        and len(devices_of(trainer)) > 1
        and all(device.device_type == "gpu" for device in devices_of(trainer))
        and not compression_of(trainer)
        and all(
            # It knows no sparse arrays, and would round halves after each addition.
            weight_storage(parameter) == gradient_storage(parameter) == "default"
            and np.dtype(parameter.dtype) in (np.float32, np.float64)
            for parameter in parameters_of(trainer)
        )
    )


def make_parameters(parameters: Sequence[mx.gluon.Parameter], run: Callable[[], object]) -> None:
    """``run()`` the net once where shapes of these parameters follow from its input."""
    if any(waits_for_shape(parameter) for parameter in parameters):
        with mx.autograd.pause():
            run()
        # oneDNN has laid weights out anew for that, and ps-lite cannot send such.
        make_plain(*(array for one in parameters if has_values(one) for array in one.list_data()))


def broadcast_weights(net: mx.gluon.Block, trainer: mx.gluon.Trainer, run: Callable[[], object] | None) -> None:
    """Copy process 0's values to all processes, before the first gradients: those of the trainer, and of all the net.

    ``run()``, a forward pass, shows parameters their shapes; None: there are no samples. A trainer alone sends its
    parameters after the first gradients, and knows no others.
    """
    parameters = [*parameters_of(trainer), *outside(net, trainer).values()]
    if run is None and any(waits_for_shape(parameter) for parameter in parameters):
        raise GradientUnavailable(
            "the first step has no samples here, and the net's parameters do not know their shapes yet; "
            "state every layer's in_units or in_channels"
        )
    make_parameters(parameters, run or (lambda: None))
    if not has_made_store(trainer):
        make_store(trainer)
    describe = contract(store_of(trainer)).describe
    for number, parameter in enumerate(parameters_of(trainer)):
        parameter.list_data()  # MXNet's error, where the forward pass has not reached it
        describe(number, parameter.name)  # by these numbers a trainer exchanges gradients
    if store_of(trainer) is not None:
        fill_store(trainer)
        broadcast_others(net, trainer, store_of(trainer))


def broadcast_others(net: mx.gluon.Block, trainer: mx.gluon.Trainer, store: mx.kv.KVStoreBase) -> None:
    """Compare the net's parameters over the processes, and copy process 0's values of those outside of the trainer.

    A trainer exchanges by the order of its parameters' names, which Gluon numbers as layers are made. So layers that a
    process makes in another order would be trained with the gradients of others.

    Raises:
        WorkersDiffer: on another process, another parameter has the same number in the trainer, or another shape.
    """
    ours = contract(store)
    if ours.num_workers == 1:
        return
    names, others = _names(net), outside(net, trainer).values()
    held = [
        f"{_said(one, names)} as the trainer's parameter {number}" for number, one in enumerate(parameters_of(trainer))
    ]
    agree(ours, [*held, *(f"{_said(one, names)} outside of the trainer" for one in others)], _SAME_ORDER)
    for one in others:
        if has_values(one):
            key = next(state_of(ours).new_keys)
            ours.describe(key, one.name)
            copies = one.list_data()
            store.broadcast(key, copies[0], copies)


def outside(net: mx.gluon.Block, trainer: mx.gluon.Trainer) -> dict[int, mx.gluon.Parameter]:
    """The net's parameters that the trainer does not hold, by their identity."""
    held = {id(parameter) for parameter in parameters_of(trainer)}
    every = (*parameters_by_structure(net).values(), *net.collect_params().values())
    return {id(parameter): parameter for parameter in every if id(parameter) not in held}


def _names(net: mx.gluon.Block) -> dict[int, str]:
    """Where each parameter is in the net, by its identity; one that several layers share is in several places."""
    found_in: dict[int, list[str]] = {}
    for name, parameter in parameters_by_structure(net).items():
        found_in.setdefault(id(parameter), []).append(name)
    for number, parameter in enumerate(net.collect_params().values()):  # those that are no attribute of a block
        found_in.setdefault(id(parameter), [f"parameter {number}"])
    return {identity: ", ".join(found) for identity, found in found_in.items()}


def _said(parameter: mx.gluon.Parameter, names: dict[int, str]) -> str:
    """What this process holds, in words that another one's are compared with."""
    values = signature(parameter.list_data()) if has_values(parameter) else "without values"
    return f"hold {names.get(id(parameter), 'one of another net')} {values}"
