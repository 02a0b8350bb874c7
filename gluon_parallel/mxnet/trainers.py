"""What a ``gluon.Trainer`` keeps to itself: its parameters, devices, optimizer and store, and how it makes the store.

Those that steps call are attribute getters, which cost no call of Python code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Callable

from .compat import mx

_OfTrainer = Callable[["mx.gluon.Trainer"], Any]

parameters_of: _OfTrainer = attrgetter("_params")  # a list; their numbers in it are their keys in store and optimizer
devices_of: _OfTrainer = attrgetter("_contexts")  # when the trainer was made; None if a parameter had no values then
optimizer_of: _OfTrainer = attrgetter("_optimizer")
updaters_of: _OfTrainer = attrgetter("_updaters")  # for each device, what has the optimizer's states
scale_of: _OfTrainer = attrgetter("_scale")  # the optimizer's own `rescale_grad`, before any division by samples
has_sparse_weights: _OfTrainer = attrgetter("_contains_sparse_weight")
LOSS_SCALER = "_amp_loss_scaler"  # attribute of a trainer that `contrib.amp` has prepared; steps read it by `getattr`

# The store. Until it is made, the trainer has what the caller has asked for.
has_made_store: _OfTrainer = attrgetter("_kv_initialized")  # also where it needs none
store_of: _OfTrainer = attrgetter("_kvstore")  # None if it needs none, or has not made it yet
updates_on_store: _OfTrainer = attrgetter("_update_on_kvstore")  # None until the store is made
is_distributed_in_mxnet: _OfTrainer = attrgetter("_distributed")
compression_of: _OfTrainer = attrgetter("_compression_params")
waiting_for_store: _OfTrainer = attrgetter("_params_to_init")  # parameters that the store does not have yet
_wishes_of: _OfTrainer = attrgetter("_kvstore_params")


def wanted_store(trainer: mx.gluon.Trainer) -> Any:
    """The store that the trainer will make or use: a name, an object, or None."""
    return _wishes_of(trainer)["kvstore"]


def want_store(trainer: mx.gluon.Trainer, store: Any) -> Any:
    """Have the trainer make or use this store; returns it."""
    _wishes_of(trainer)["kvstore"] = store
    return store


def wants_update_on_store(trainer: mx.gluon.Trainer) -> bool | None:
    """Whether the caller has asked for updates on the store; None leaves it to the trainer."""
    return _wishes_of(trainer)["update_on_kvstore"]


def want_update_on_devices(trainer: mx.gluon.Trainer) -> None:
    """Have the trainer update on the devices, whatever its store; before it makes the store."""
    _wishes_of(trainer)["update_on_kvstore"] = False


def make_store(trainer: mx.gluon.Trainer) -> None:
    """Have the trainer make its store, which it does at its first step otherwise."""
    trainer._init_kvstore()


def fill_store(trainer: mx.gluon.Trainer) -> None:
    """Have the trainer give its store the parameters that this does not have and that have values."""
    trainer._init_params()


def forget_store(trainer: mx.gluon.Trainer) -> None:
    """Have the trainer make its store anew, at its next step."""
    trainer._reset_kvstore()


def set_progress_of_store(trainer: mx.gluon.Trainer, has_made: bool, waiting: Sequence[mx.gluon.Parameter]) -> None:
    """Set whether the trainer has made its store, and which parameters the store does not have."""
    trainer._kv_initialized, trainer._params_to_init = has_made, list(waiting)


def wait_for_store(trainer: mx.gluon.Trainer, waiting: list[mx.gluon.Parameter]) -> None:
    """Set which parameters the trainer's store does not have yet."""
    trainer._params_to_init = waiting


def numbers_by_name(trainer: mx.gluon.Trainer) -> dict[str, int]:
    """The number of each parameter by its name; of those with one name, that of the last one."""
    return trainer._param2idx


def set_compression(trainer: mx.gluon.Trainer, parameters: Mapping[str, Any] | None) -> None:
    """Set the ``compression_params`` that the trainer's store gets when it is made."""
    trainer._compression_params = parameters


def has_sparse_gradients(trainer: mx.gluon.Trainer) -> bool:
    """Whether the trainer takes any gradient for a sparse one, and so refuses stores that are not MXNet's."""
    return trainer._contains_sparse_grad


def set_sparse_gradients(trainer: mx.gluon.Trainer, has_any: bool) -> None:
    """Set what :func:`has_sparse_gradients` returns."""
    trainer._contains_sparse_grad = has_any


def check_devices(trainer: mx.gluon.Trainer) -> list[mx.Context]:
    """The devices of the parameters, which must all have the same ones; raises AssertionError."""
    return trainer._check_contexts()


def set_devices(trainer: mx.gluon.Trainer, devices: list[mx.Context], updaters: list[mx.optimizer.Updater]) -> None:
    """Have the trainer train on these devices, each with its updater."""
    trainer._contexts, trainer._updaters = devices, updaters


def set_scale(trainer: mx.gluon.Trainer, scale: float) -> None:
    """Set :func:`scale_of`."""
    trainer._scale = scale


def loss_scaler_of(trainer: mx.gluon.Trainer) -> Any:
    """The loss scaler of mixed precision; None without."""
    return getattr(trainer, LOSS_SCALER, None)


def set_loss_scaler(trainer: mx.gluon.Trainer, scaler: Any) -> None:
    """Set the loss scaler; None: MXNet's own steps do not look for overflow."""
    setattr(trainer, LOSS_SCALER, scaler)


def scale_without_loss_scaling(trainer: mx.gluon.Trainer) -> float:
    """:func:`scale_of` before mixed precision had changed it."""
    return trainer._amp_original_scale
