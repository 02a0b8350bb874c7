"""Preparation of the first step: the trainer's store (NCCL or our sums), and the same weights on all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

import numpy as np

from .. import kvstore
from ..compat import mx
from ..engine import make_plain
from ..errors import GradientUnavailable
from ..kvstore.contract import contract
from ..kvstore.trainer_parameters import follow_parameters


def update_on_devices(trainer: mx.gluon.Trainer) -> mx.kv.KVStoreBase | str | None:
    """Have the trainer update on the devices, not on its store; returns the store, its name, or None."""
    follow_parameters(trainer)
    wanted = trainer._kvstore_params["update_on_kvstore"]
    if trainer._update_on_kvstore if trainer._kv_initialized else wanted:
        raise GradientUnavailable(
            "the trainer updates on its store, so gradients can neither be clipped nor weighted exactly; "
            "write gluon.Trainer(..., update_on_kvstore=False), or build DataParallel before the trainer's "
            "first step and before its state is saved or restored"
        )
    trainer._kvstore_params["update_on_kvstore"] = False
    kvstore.trainer_loops.sum_over_devices(trainer)
    if trainer._kv_initialized:
        return trainer._kvstore
    store = trainer._kvstore_params["kvstore"]
    if isinstance(store, str) and store.lower().startswith(("auto", *kvstore.OURS, "dist")):
        store = trainer._kvstore_params["kvstore"] = kvstore.create(store)  # the first step may have no samples
    if getattr(store, "type", store) in ("device", "local"):
        # Without NCCL `allreduce` does their work, with fewer copies.
        store = trainer._kvstore_params["kvstore"] = kvstore.create("nccl") if nccl_fits(trainer) else None
    return store


def nccl_fits(trainer: mx.gluon.Trainer) -> bool:
    """Whether MXNet was built with NCCL, and NCCL can add the gradients of this process's GPUs as `allreduce` would."""
    return (
        mx.runtime.Features().is_enabled("NCCL")
        and len(trainer._contexts) > 1
        and all(device.device_type == "gpu" for device in trainer._contexts)
        and not trainer._compression_params
        and all(
            # It knows no sparse arrays, and would round halves after each addition.
            parameter._stype == parameter._grad_stype == "default"
            and np.dtype(parameter.dtype) in (np.float32, np.float64)
            for parameter in trainer._params
        )
    )


def make_parameters(parameters: Sequence[mx.gluon.Parameter], run: Callable[[], object]) -> None:
    """``run()`` the net once where shapes of these parameters follow from its input."""
    if any(parameter._deferred_init for parameter in parameters):
        with mx.autograd.pause():
            run()
        # oneDNN has laid weights out anew for that, and ps-lite cannot send such.
        make_plain(*(array for parameter in parameters for array in parameter.list_data()))


def broadcast_weights(net: mx.gluon.Block, trainer: mx.gluon.Trainer, shard: tuple[tuple, tuple] | None) -> None:
    """Copy process 0's weights to all processes, before the first gradients; a trainer alone does it after them.

    `shard`, the first (inputs, labels), or None without samples, shows parameters their shapes.
    """
    if shard is None and any(parameter._deferred_init for parameter in trainer._params):
        raise GradientUnavailable(
            "the first step has no samples here, and the net's parameters do not know their shapes yet; "
            "state every layer's in_units or in_channels"
        )
    make_parameters(trainer._params, lambda: shard and net(*shard[0]))
    if not trainer._kv_initialized:
        trainer._init_kvstore()
    describe = contract(trainer._kvstore).describe
    for number, parameter in enumerate(trainer._params):
        describe(number, parameter.name)  # by these numbers a trainer exchanges gradients
    if trainer._kvstore is not None:
        trainer._init_params()
