"""What a ``mx.mod.Module`` keeps to itself: its devices, parameters, optimizer and store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Callable

from .compat import mx
from .optimizers import updater_in

_OfModule = Callable[["mx.mod.Module"], Any]

devices_of_module: _OfModule = attrgetter("_context")
store_of_module: _OfModule = attrgetter("_kvstore")  # None if it needs none, or has no optimizer yet
updates_on_modules_store: _OfModule = attrgetter("_update_on_kvstore")
compression_of_module: _OfModule = attrgetter("_compression_params")
batch_size_of_module: _OfModule = attrgetter("_exec_group.batch_size")  # of all devices
parameter_names: _OfModule = attrgetter("_exec_group.param_names")  # in the order of their numbers
weights_by_name: Callable[[mx.mod.Module], Mapping[str, Any]] = attrgetter("_arg_params")  # those on the host


def updater_of_module(module: mx.mod.Module) -> mx.optimizer.Updater | None:
    """What updates the weights: the module's own, or that in its store; None if neither is in this process."""
    return module._updater or updater_in(module._kvstore)


def copies_by_name(module: mx.mod.Module) -> list[tuple[str, Sequence[mx.nd.NDArray]]]:
    """(name, its arrays on the devices) of each parameter, in the order of their numbers."""
    return list(zip(module._param_names, module._exec_group.param_arrays))
