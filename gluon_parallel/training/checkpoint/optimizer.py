"""The state of a trainer's optimizer as named arrays and numbers, whole on every process."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Optional

import numpy as np

from ...archive import Archive, described, refuse_differences
from ...errors import CheckpointError
from ...kvstore.trainer_parameters import follow_parameters
from ...mxnet.compat import mx
from ...mxnet.compat.array_types import as_legacy, leaves
from ...mxnet.optimizers import set_counts, updater_in
from ...mxnet.trainers import (
    devices_of,
    fill_store,
    has_made_store,
    loss_scaler_of,
    make_store,
    parameters_of,
    store_of,
    updaters_of,
    updates_on_store,
    waiting_for_store,
)
from ...pipeline.stage import StageDevices
from ...reduce.reducer import shards_of
from ...reduce.shards import Shards, view_of
from ...reduce.update_order import counts_of
from ...step.first_step import update_on_devices
from ...step.precision import LossScaling
from .hook_state import check_hook, keeps_own_values, restore_hook, state_of_hook
from .parameters import initialized_parameters


def _scalars(thing: Any) -> dict[str, Any]:
    """The attributes that are numbers or None."""
    return {key: value for key, value in vars(thing).items() if type(value) in (int, float, type(None))}


def _schedule_values(schedule: Any, prefix: str = "") -> dict[str, tuple[dict[str, Any], str]]:
    """Where the numbers of a learning rate schedule are, and of schedules in it: by name, attributes and a key."""
    if schedule is None:
        return {}
    found = {prefix + key: (vars(schedule), key) for key in _scalars(schedule)}
    for key, value in vars(schedule).items():
        if isinstance(value, mx.lr_scheduler.LRScheduler):
            found.update(_schedule_values(value, f"{prefix}{key}."))
    return found


# Set by an environment variable or by MXNet's mode, not by training.
_NOT_STATE = ("aggregate_num", "allow_np_array")


def _running_values(optimizer: Any) -> dict[str, Any]:
    """The numbers that an optimizer changes while it works: those that are not arguments of its constructor."""
    values = {
        key: value for key, value in _scalars(optimizer).items() if key not in {*_arguments(optimizer), *_NOT_STATE}
    }
    return {**values, "lr": optimizer.lr}  # Trainer.set_learning_rate changes it


def _arguments(optimizer: Any) -> set[str]:
    return {name for base in type(optimizer).__mro__[:-1] for name in inspect.signature(base).parameters}


def _not_saved(optimizer: Any) -> list[str]:
    """Attributes with arrays, or lists of numbers that no argument of the constructor gave."""
    arguments = _arguments(optimizer)
    return [
        key
        for key, value in vars(optimizer).items()
        for _, leaf in leaves(value)
        if isinstance(leaf, mx.nd.NDArray)
        or (isinstance(value, list) and isinstance(leaf, (int, float)) and key not in arguments)
    ]


def _flatten(state: Any, name: str = "optimizer") -> dict[str, mx.nd.NDArray]:
    """The arrays of the optimizer's state by parameter: each an array, None, or nested tuples of them."""
    if state is None:
        return {}
    if isinstance(state, mx.nd.NDArray):
        return {name: state}
    parts = state.items() if isinstance(state, dict) else enumerate(state)
    return {key: array for part, inner in parts for key, array in _flatten(inner, f"{name}/{part}").items()}


def _names(net: mx.gluon.Block, trainer: mx.gluon.Trainer) -> list[str]:
    """The name of each of the trainer's parameters, in its order; of a shared one, the first name."""
    name_of = {id(parameter): name for name, parameter in reversed(list(initialized_parameters(net).items()))}
    return [name_of.get(id(parameter), parameter.name) for parameter in parameters_of(trainer)]


def _updaters(trainer: mx.gluon.Trainer) -> list[Any]:
    """What holds the optimizer's arrays: one updater per device, or the one of the key-value store."""
    follow_parameters(trainer)
    if not has_made_store(trainer):
        if isinstance(devices_of(trainer), StageDevices):  # a pipeline learns of its trainer at the first step
            update_on_devices(trainer)
        make_store(trainer)
    if waiting_for_store(trainer):
        fill_store(trainer)
    if not updates_on_store(trainer):
        return updaters_of(trainer)
    updater = updater_in(store_of(trainer))
    if updater is None:
        raise CheckpointError(
            f"the optimizer of kvstore {store_of(trainer).type!r} lives in its servers, where no checkpoint reaches "
            "it: make the trainer with update_on_kvstore=False"
        )
    return [updater]


def _states(trainer: mx.gluon.Trainer) -> Iterator[tuple[int, Any]]:
    """(a parameter's number, its whole state), one at a time; if it is sharded, all processes must iterate."""
    [updater, *_], shards = _updaters(trainer), shards_of(trainer)
    if shards is None:
        yield from updater.states.items()
        return
    shards.divide()
    for number in sorted(shards.with_state):
        yield number, _gathered(trainer, shards, number)


def _gathered(trainer: mx.gluon.Trainer, shards: Shards, number: int) -> Any:
    """The whole state of one parameter, of which the devices of all processes have parts."""
    weight = as_legacy(parameters_of(trainer)[number].list_data()[0])
    whole = trainer.optimizer.create_state_multi_precision(number, weight)
    for key, array in _flatten(whole).items():
        for index, updater in enumerate(updaters_of(trainer)):
            begin, end = shards.owned(number, index)
            if begin < end:
                _flatten(updater.states[number])[key].copyto(view_of(array, begin, end))
        shards.gather([number], [[array]])
    return whole


def is_divided(trainer: mx.gluon.Trainer) -> bool:
    """Whether processes keep different parts of a trainer's state, so that all have to call :func:`state`."""
    return shards_of(trainer) is not None or keeps_own_values(trainer)


def state_of_optimizer(
    net: mx.gluon.Block, trainer: mx.gluon.Trainer, keeps_arrays: bool
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, facts) of a trainer's optimizer and what its communication hook keeps; without arrays if told so.

    If the state is sharded or there is a hook, all processes call it.
    """
    optimizer, names, stateful = trainer.optimizer, _names(net, trainer), []
    schedule, scheduled = optimizer.lr_scheduler, _schedule_values(optimizer.lr_scheduler)
    if unsaved := _not_saved(optimizer):
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps arrays or a list of numbers in its attribute {unsaved[0]!r}, which "
            "no checkpoint takes: return arrays from create_state, keep single numbers, or save the net alone"
        )
    arrays: dict[str, np.ndarray] = {}
    for index, whole in _states(trainer):
        stateful.append(names[index])
        if keeps_arrays:
            named = _flatten({names[index]: whole})
            arrays.update({key: array.asnumpy() for key, array in named.items()})
    arrays.update(state_of_hook(trainer, names))
    scaler = loss_scaler_of(trainer)  # of mixed precision
    return arrays, {
        "name": type(optimizer).__name__,
        "values": _running_values(optimizer),
        "counts": {names[index]: count for index, count in counts_of(optimizer).items()},
        "stateful": stateful,
        "scheduler": None if schedule is None else {name: values[key] for name, (values, key) in scheduled.items()},
        "loss_scaler": None if scaler is None else _scalars(scaler),
    }


def checked_optimizer(
    archive: Archive, net: mx.gluon.Block, trainer: mx.gluon.Trainer, source: str
) -> Callable[[], None]:
    """Check that the optimizer's state fits; returns the function that puts it in place."""
    optimizer, names, saved = trainer.optimizer, _names(net, trainer), archive.facts.get("optimizer")
    remedy = "Make the trainer as it was made then, or load the parameters alone: leave the trainer out"
    if saved is None:
        raise CheckpointError(f"{source} holds parameters alone, no optimizer. {remedy}")
    if saved["name"] != type(optimizer).__name__:
        raise CheckpointError(f"{source} was trained by {saved['name']}, not by {type(optimizer).__name__}. {remedy}")
    fixed = {*_arguments(optimizer), *_NOT_STATE, *(vars(optimizer).keys() - _scalars(optimizer).keys())} - {"lr"}
    for name, value in saved["values"].items():
        is_lost = value is None and vars(optimizer).get(name) is not None
        if name in fixed or is_lost or hasattr(type(optimizer), name):
            raise CheckpointError(f"{source} is damaged: {name!r} is no number that {type(optimizer).__name__} counts")
    schedule, rates = optimizer.lr_scheduler, saved["scheduler"] or {}
    if schedule is not None and not rates.keys() <= _schedule_values(schedule).keys():
        raise CheckpointError(
            f"{source} was trained with another kind of learning rate schedule than {type(schedule).__name__}. {remedy}"
        )
    unknown = [name for name in [*saved["stateful"], *saved["counts"]] if name not in names]
    refuse_differences({}, dict.fromkeys(unknown, []), f"{source} is of another trainer", remedy)

    # The optimizer makes its arrays itself, of the shape, dtype and kind that it needs; they only have to be filled.
    index_of = {name: index for index, name in enumerate(names)}
    contexts = parameters_of(trainer)[0].list_ctx()
    devices = contexts[: len(_updaters(trainer))]
    shards = shards_of(trainer)
    if shards is not None:
        shards.divide(index_of[name] for name in saved["stateful"])

    def make(name: str, device: mx.Context, part: Optional[tuple[int, int]] = None) -> Any:
        weight = as_legacy(parameters_of(trainer)[index_of[name]].data(device))
        return optimizer.create_state_multi_precision(index_of[name], view_of(weight, *(part or (0, weight.size))))

    wanted: dict[str, str] = {}
    for name in saved["stateful"]:  # one at a time: whole, all together may not fit into memory
        wanted.update({key: described(array) for key, array in _flatten({name: make(name, devices[0])}).items()})
    found = {key: [array] for key, array in archive.arrays.items() if key.startswith("optimizer/")}
    refuse_differences(wanted, found, f"{source} has another kind of optimizer state", remedy)
    check_hook(archive, trainer, names, source)

    def made_for(index: int) -> Iterator[tuple[str, Any]]:
        """(name, state) of what this device keeps."""
        for name in saved["stateful"]:
            size = parameters_of(trainer)[index_of[name]].list_data()[0].size
            begin, end = (0, size) if shards is None else shards.owned(index_of[name], index)
            if shards is None or begin < end:
                made = make(name, devices[index], (begin, end))
                for key, array in _flatten({name: made}).items():
                    value = archive.arrays[key]
                    value = value if value.shape == array.shape else value.reshape(-1)[begin:end]
                    as_legacy(array)[:] = mx.nd.array(value, dtype=value.dtype)
                yield name, made

    counts = {index_of[name]: count for name, count in saved["counts"].items()}

    def fill() -> None:
        # Only now: setting parameters may have restarted the key-value store, with a new updater.
        if shards is not None:
            shards.with_state.update(index_of[name] for name in saved["stateful"])
        for index, updater in enumerate(_updaters(trainer)):
            for name, state in made_for(index):
                updater.states[index_of[name]] = state
                updater.states_synced[index_of[name]] = False  # its device may be another; the updater moves it
            running = updater.optimizer
            vars(running).update(saved["values"])
            set_counts(running, dict(counts))  # the next update gives them to all devices
            for name, (values, key) in _schedule_values(running.lr_scheduler).items():
                values[key] = rates.get(name, values[key])
        restore_hook(archive, trainer, names)
        LossScaling(trainer)  # with float16 this makes the scale now; a pipeline would at its first step
        scaler = loss_scaler_of(trainer)
        if scaler is not None and saved.get("loss_scaler"):
            vars(scaler).update(saved["loss_scaler"])

    return fill
