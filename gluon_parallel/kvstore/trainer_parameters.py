"""A trainer follows its parameters: to other devices, and to values that the caller gives them between two steps.

MXNet's Trainer notes the devices when it is made, and would update on these alone. Its optimizers keep a float32 copy
of float16 weights, and would write that over the caller's values. Both without a word.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..allreduce import written
from ..errors import GradientUnavailable
from ..mxnet.attached import Attached
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import as_legacy, leaves
from ..mxnet.optimizers import set_updater
from ..mxnet.parameters import values_of
from ..mxnet.trainers import (
    devices_of,
    fill_store,
    forget_store,
    has_made_store,
    make_store,
    optimizer_of,
    parameters_of,
    set_devices,
    store_of,
    updaters_of,
    updates_on_store,
    want_store,
    wanted_store,
)
from .contract import is_mxnets


class _Known(NamedTuple):
    """Of a trainer, when it was compared with its parameters: how often any was written before, and their dtypes."""

    num_written: int
    dtypes: list[np.dtype]


_known: Attached[_Known] = Attached("parameters")  # of trainers
# Of optimizers, whose attributes are compared and saved, so that nothing is attached to them.
_copies: weakref.WeakKeyDictionary[Any, dict[int, list[str]]] = weakref.WeakKeyDictionary()
_fixed: Attached[str] = Attached("fixed_devices")  # of trainers: why they keep their devices


def fix_devices(trainer: Any, reason: str) -> None:
    """From now on, refuse other devices for this trainer."""
    _fixed.set(trainer, reason)


def follow_parameters(trainer: Any) -> None:
    """Give the trainer the devices of its parameters; each gets the optimizer's state that the first one had.

    A store within this process is made anew where the devices change, for MXNet's stores keep buffers for each device.

    Raises:
        GradientUnavailable: the parameters are not on as many devices as each other; the trainer cannot change its
            devices; or the optimizer has a state of another dtype.
    """
    known = _known.of(trainer)
    if known is not None and known.num_written == written.num:
        return
    parameters = parameters_of(trainer)
    lists = [parameter.list_ctx() for parameter in parameters]
    for parameter, devices in zip(parameters, lists):
        if len(devices) != len(lists[0]):
            raise GradientUnavailable(
                f"{parameters[0].name} is on {lists[0]}, and {parameter.name} on {devices}; all parameters of a "
                "trainer must be on as many devices: net.collect_params().reset_ctx(devices)"
            )
    dtypes = [np.dtype(parameter.dtype) for parameter in parameters]
    if known is None:
        known = _Known(written.num, dtypes)
    has_moved = any(devices != devices_of(trainer) for devices in lists)
    _refuse_other_dtypes(trainer, dtypes, known.dtypes)
    if has_moved:
        _refuse_devices(trainer, lists[0])
    _known.set(trainer, _Known(written.num, dtypes))
    if has_moved or dtypes != known.dtypes:
        _move(trainer, lists[0])
    for number, parameter in enumerate(parameters):
        if written.since(parameter, known.num_written):
            _renew_master_copies(trainer, number, parameter)


def _refuse_other_dtypes(trainer: Any, dtypes: Sequence[np.dtype], before: Sequence[np.dtype]) -> None:
    for number, (parameter, dtype, last) in enumerate(zip(parameters_of(trainer), dtypes, before)):
        states = [updater.states.get(number) for updater in updaters_of(trainer) if dtype != last]
        if any(isinstance(leaf, mx.nd.NDArray) for _, leaf in leaves(states)):
            raise GradientUnavailable(
                f"{parameter.name} was cast from {last.name} to {dtype.name}, and the optimizer's state for it is of "
                f"{last.name}. Cast before the first update, or make a new trainer, which starts without a state"
            )


def _refuse_devices(trainer: Any, devices: list[mx.Context]) -> None:
    store, before = store_of(trainer), devices_of(trainer)
    where = f"the trainer's parameters were on {before}, and are on {devices} now"
    if reason := _fixed.of(trainer):
        raise GradientUnavailable(f"{where}. {reason}")
    if isinstance(store, mx.kv.KVStore) and not is_mxnets(store) and len(devices) > len(before):
        raise GradientUnavailable(
            f"{where}. MXNet's store {store.type!r} cannot take the gradients of more devices than before: call "
            "reset_ctx before the trainer's first step"
        )
    if updates_on_store(trainer) and is_mxnets(store) and len(devices) == 1:
        raise GradientUnavailable(
            f"{where}. For one device there is no store {store.type!r}, which updates (update_on_kvstore=True): make "
            "the trainer without update_on_kvstore"
        )


def _move(trainer: Any, devices: list[mx.Context]) -> None:
    states, aggregates = updaters_of(trainer)[0].get_states(), updaters_of(trainer)[0].aggregate_updates
    updaters = [mx.optimizer.get_updater(optimizer_of(trainer)) for _ in devices]
    for updater in updaters:
        updater.set_states(states)  # copies, which an update moves to its device
        updater.aggregate_updates = aggregates
    set_devices(trainer, devices, updaters)
    if has_made_store(trainer) and (store_of(trainer) is None or is_mxnets(store_of(trainer))):
        forget_store(trainer)
        make_store(trainer)
        fill_store(trainer)


def reset_store(reset_in_mxnet: Callable[..., None], trainer: Any) -> None:
    """Have the trainer make its store anew, also where the caller made it: a key of MXNet's cannot be opened twice."""
    if is_mxnets(store_of(trainer)) and not isinstance(wanted_store(trainer), str):
        want_store(trainer, mx.kv.create(store_of(trainer).type))
    reset_in_mxnet(trainer)


def keep_states(trainer: Any) -> None:
    """Where a new store within this process updates, it goes on with the optimizer's state of the one before."""
    store = store_of(trainer)
    if updates_on_store(trainer) and is_mxnets(store):
        updater = updaters_of(trainer)[0]
        updater.states_synced = dict.fromkeys(updater.states, False)  # it may update on another device
        set_updater(store, updater)


def _renew_master_copies(trainer: Any, number: int, parameter: Any) -> None:
    """Where a float16 weight is not what the optimizer's float32 copy of it was rounded to, copy the weight's values.

    Parts of a sharded state stay.
    """
    optimizer = optimizer_of(trainer)
    if not optimizer.multi_precision or np.dtype(parameter.dtype) != np.float16:
        return
    for updater, weight in zip(updaters_of(trainer), map(as_legacy, values_of(parameter) or ())):
        state = dict(leaves(updater.states.get(number)))
        for where in _copies_in(optimizer, number, weight.ndim) if number in updater.states else ():
            if state[where].shape == weight.shape:
                value = weight.as_in_context(state[where].ctx)
                rounded = state[where].astype(value.dtype)
                state[where][:] = mx.nd.where(rounded == value, state[where], value.astype(state[where].dtype))


def _copies_in(optimizer: mx.optimizer.Optimizer, number: int, ndim: int) -> list[str]:
    """Where in the state of a parameter, as :func:`.leaves` names it, copies of the weight are."""
    known = _copies.setdefault(optimizer, {})
    if number not in known:
        zero, one = (
            dict(leaves(optimizer.create_state_multi_precision(number, make((1,) * ndim, dtype="float16"))))
            for make in (mx.nd.zeros, mx.nd.ones)
        )
        arrays = [where for where, leaf in zero.items() if isinstance(leaf, mx.nd.NDArray)]
        known[number] = [where for where in arrays if (zero[where].asnumpy() != one[where].asnumpy()).any()]
    return known[number]
