"""The state of a net and its trainer as named arrays, which load on any number of devices.

State is what *training* changed: weights, running statistics, the optimizer's arrays, its update counts, the learning
rate and its scheduler; not what the script *made*: the architecture, the kind of optimizer, its momentum. Parameters go
by their index in the net (``features.0.weight``), not by MXNet's numbered prefixes.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Optional

import numpy as np

from ...archive import Archive, described, refuse_differences
from ...errors import CheckpointError
from ...kvstore.clients import open_named
from ...kvstore.factory import meets_others
from ...kvstore.trainer_parameters import follow_parameters
from ...mxnet.compat import mx
from ...mxnet.compat.array_types import as_current, as_legacy, leaves
from ...mxnet.optimizers import set_counts, updater_in
from ...mxnet.parameters import draw_first_values, trainer_of, waits_for_shape
from ...mxnet.trainers import (
    devices_of,
    fill_store,
    forget_store,
    has_made_store,
    loss_scaler_of,
    make_store,
    parameters_of,
    store_of,
    updaters_of,
    updates_on_store,
    waiting_for_store,
    want_store,
    wanted_store,
)
from ...pipeline.stage import StageDevices
from ...reduce.reducer import shards_of
from ...reduce.shards import Shards, view_of
from ...reduce.update_order import counts_of
from ...step.first_step import update_on_devices
from ...step.precision import LossScaling
from . import forms
from .hook_state import check_hook, keeps_own_values, restore_hook, state_of_hook
from .parameters import copies_by_name, copies_for, initialized_parameters, named_copies, shape_with


def _scalars(thing: Any) -> dict[str, Any]:
    """The attributes that are numbers or None."""
    return {key: value for key, value in vars(thing).items() if type(value) in (int, float, type(None))}


def _places(schedule: Any, prefix: str = "") -> dict[str, tuple[dict[str, Any], str]]:
    """Where the numbers of a learning rate schedule are, and of schedules in it: by name, attributes and a key."""
    if schedule is None:
        return {}
    found = {prefix + key: (vars(schedule), key) for key in _scalars(schedule)}
    for key, value in vars(schedule).items():
        if isinstance(value, mx.lr_scheduler.LRScheduler):
            found.update(_places(value, f"{prefix}{key}."))
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
    places = {id(parameter): name for name, parameter in reversed(list(initialized_parameters(net).items()))}
    return [places.get(id(parameter), parameter.name) for parameter in parameters_of(trainer)]


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


def opened_store(trainer: Optional[mx.gluon.Trainer]) -> Any:
    """The trainer's store; opened here if the trainer has not started it. None: there is none."""
    if trainer is None:
        return None
    if has_made_store(trainer):
        return store_of(trainer)
    store = want_store(trainer, open_named(wanted_store(trainer)))
    if isinstance(store, str):
        return mx.kv.create(store) if meets_others(store) else None
    return store


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


def state(net: mx.gluon.Block, trainer: Optional[mx.gluon.Trainer] = None, keeps_optimizer: bool = True) -> Archive:
    """Everything that training changed, copied to the host, for :func:`restore` and :func:`gp.archive.write`.

    One copy of each array is kept, for all devices hold the same. Where they do not (the running statistics of
    BatchNorm, which each device takes from its own shards), the copy of every device is kept.

    Args:
        net: an initialized net.
        trainer: its trainer, whose optimizer is saved along, with what its communication hook keeps. If it has
            a hook or its state is sharded, all processes call this.
        keeps_optimizer: False leaves the optimizer's arrays out, but takes part in gathering sharded ones.

    Raises:
        CheckpointError: the net is not initialized, or the optimizer keeps its arrays where they cannot be saved.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, parameter in initialized_parameters(net).items():
        arrays.update(named_copies(name, parameter.list_data()))
    facts: dict[str, Any] = {"net": type(net).__name__}
    if trainer is not None:
        optimizer, names, stateful = trainer.optimizer, _names(net, trainer), []
        schedule, places = optimizer.lr_scheduler, _places(optimizer.lr_scheduler)
        if unsaved := _not_saved(optimizer):
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps arrays or a list of numbers in its attribute {unsaved[0]!r}, which "
                "no checkpoint takes: return arrays from create_state, keep single numbers, or save the net alone"
            )
        for index, whole in _states(trainer):
            stateful.append(names[index])
            if keeps_optimizer:
                named = _flatten({names[index]: whole})
                arrays.update({key: array.asnumpy() for key, array in named.items()})
        arrays.update(state_of_hook(trainer, names))
        facts["optimizer"] = {
            "name": type(optimizer).__name__,
            "values": _running_values(optimizer),
            "counts": {names[index]: count for index, count in counts_of(optimizer).items()},
            "stateful": stateful,
            "scheduler": None if schedule is None else {name: values[key] for name, (values, key) in places.items()},
        }
        scaler = loss_scaler_of(trainer)  # of mixed precision
        facts["optimizer"]["loss_scaler"] = None if scaler is None else _scalars(scaler)
    return Archive(arrays, facts)


def restore(
    archive: Archive, net: mx.gluon.Block, trainer: Optional[mx.gluon.Trainer] = None, source: str = "it"
) -> None:
    """Put a state back into a net of the same architecture and a trainer with the same kind of optimizer.

    The number and the kind of devices may be others than those that it was saved on; where each device had its own
    copy of an array and there are now fewer or more devices, all of them get the mean.

    Args:
        archive: what :func:`state` returned, or :func:`gluon_parallel.archive.read`.
        net: initialized on the devices that it shall train on.
        trainer: leave it out to load the parameters alone.
        source: what the errors call the state, usually its file's name.

    Raises:
        CheckpointError: the state belongs to another architecture or another optimizer; the message names the first
            parameters that differ. Nothing has been changed then.
    """
    checked(archive, net, trainer, source)()


def checked(
    archive: Archive, net: mx.gluon.Block, trainer: Optional[mx.gluon.Trainer], source: str
) -> Callable[[], None]:
    """Check that a state fits a net and a trainer, as :func:`restore` does; returns the function that puts it back."""
    if not isinstance(archive, Archive):
        raise CheckpointError(
            f"archive: got a {type(archive).__name__}, expected what gp.checkpoint.state or gp.archive.read returned; "
            "a file is loaded with gp.checkpoint.load(path, net, trainer)"
        )
    forms.check(archive.facts, forms.STATE, source)
    parameters = initialized_parameters(net, may_be_deferred=True)
    copies = copies_by_name(archive)
    shapes = {name: values[0].shape for name, values in copies.items()}
    refuse_differences(
        {name: described(each, shape_with(each, shapes.get(name, ()))) for name, each in parameters.items()},
        copies,
        f"{source} is of another architecture ({archive.facts.get('net', 'no Gluon net')}) than this "
        f"{type(net).__name__}",
    )
    for name, parameter in parameters.items():
        if waits_for_shape(parameter):
            parameter.shape = shapes[name]
            draw_first_values(parameter)
    fill_optimizer = _prepare_optimizer(archive, net, trainer, source) if trainer is not None else None

    def fill() -> None:
        for name, values in copies.items():
            if len(values) == 1:
                _set_data(parameters[name], values[0])
        if fill_optimizer is not None:
            fill_optimizer()
        # Last: a trainer that starts hands the first device's copy to all others.
        for name, values in copies.items():
            if len(values) > 1:
                here = parameters[name].list_data()
                for data, copy in zip(here, copies_for(len(here), values)):
                    as_legacy(data)[:] = mx.nd.array(copy, dtype=copy.dtype)

    return fill


def _prepare_optimizer(archive: Archive, net: mx.gluon.Block, trainer: mx.gluon.Trainer, source: str) -> Any:
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
    if schedule is not None and not rates.keys() <= _places(schedule).keys():
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
            for name, (values, key) in _places(running.lr_scheduler).items():
                values[key] = rates.get(name, values[key])
        restore_hook(archive, trainer, names)
        LossScaling(trainer)  # with float16 this makes the scale now; a pipeline would at its first step
        scaler = loss_scaler_of(trainer)
        if scaler is not None and saved.get("loss_scaler"):
            vars(scaler).update(saved["loss_scaler"])

    return fill


def _set_data(parameter: mx.gluon.Parameter, array: np.ndarray) -> None:
    value = mx.nd.array(array, dtype=array.dtype)
    if array.ndim:
        parameter.set_data(as_current(value))
        return
    trainer = trainer_of(parameter)  # MXNet's set_data cannot fill mx.np arrays of no dimension
    if (
        trainer
        and has_made_store(trainer)
        and updates_on_store(trainer)
        and parameter not in waiting_for_store(trainer)
    ):
        forget_store(trainer)
    for data in parameter.list_data():
        as_legacy(data)[:] = value
