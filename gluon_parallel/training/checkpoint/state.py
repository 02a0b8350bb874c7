"""The state of a net and its trainer as named arrays, which load on any number of devices.

State is what *training* changed: weights, running statistics, the optimizer's arrays, its update counts, the learning
rate and its scheduler; not what the script *made*: the architecture, the kind of optimizer, its momentum. Parameters go
by their place in the net (``features.0.weight``), not by MXNet's numbered prefixes.
"""

from collections.abc import Callable
from typing import Any, Optional

import numpy as np

from ...archive import Archive, described, refuse_differences
from ...errors import CheckpointError
from ...mxnet.compat import mx
from ...mxnet.compat.array_types import as_current, as_legacy
from ...mxnet.parameters import draw_first_values, trainer_of, waits_for_shape
from ...mxnet.trainers import (
    forget_store,
    has_made_store,
    updates_on_store,
    waiting_for_store,
)
from ...pipeline.stage import StageDevices
from . import forms
from .optimizer import checked_optimizer, state_of_optimizer
from .parameters import copies_by_name, copies_for, initialized_parameters, named_copies, shape_with


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
        of_optimizer, facts["optimizer"] = state_of_optimizer(net, trainer, keeps_optimizer)
        arrays.update(of_optimizer)
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
    placed = []
    for name, parameter in parameters.items():
        if waits_for_shape(parameter):
            placed += [parameter.list_ctx()]
            parameter.shape = shapes[name]
            draw_first_values(parameter)
    for devices in placed:
        if isinstance(devices, StageDevices):
            devices.move_parameters()
    fill_optimizer = checked_optimizer(archive, net, trainer, source) if trainer is not None else None

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
