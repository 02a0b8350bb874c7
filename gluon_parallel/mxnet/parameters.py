"""What a ``gluon.Parameter`` keeps to itself: its copies on the devices, whether it has any, and who trains it.

Those that steps call are attribute getters, which cost no call of Python code.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Callable

from .compat import mx

_OfParameter = Callable[["mx.gluon.Parameter"], Any]

values_of: _OfParameter = attrgetter("_data")  # a list, one array per device; None: it has no values yet
gradients_of: _OfParameter = attrgetter("_grad")  # a list as of its values; None: it has no gradients
waits_for_shape: _OfParameter = attrgetter("_deferred_init")  # true if it gets values once its shape is known
weight_storage: _OfParameter = attrgetter("_stype")
gradient_storage: _OfParameter = attrgetter("_grad_stype")
is_differentiable: _OfParameter = attrgetter("_differentiable")
trainer_of: _OfParameter = attrgetter("_trainer")  # the last one that it was handed to; None
devices_of_values: _OfParameter = attrgetter("_ctx_list")  # the list that the parameter was given
_REPLACED = "_init_impl"  # the method that gives a parameter its first values


def has_values(parameter: mx.gluon.Parameter) -> bool:
    """Whether the parameter has arrays on its devices."""
    return parameter._data is not None


def is_initialized(parameter: mx.gluon.Parameter) -> bool:
    """Whether the parameter has values, or will get some once its shape is known."""
    return parameter._data is not None or bool(parameter._deferred_init)


def checked_values(parameter: mx.gluon.Parameter) -> list[mx.nd.NDArray]:
    """The list of the parameter's arrays, dense or not; raises MXNet's error if it has no values."""
    return parameter._check_and_get(parameter._data, list)


def set_values(parameter: mx.gluon.Parameter, arrays: list[mx.nd.NDArray]) -> None:
    """Give the parameter other arrays, on its devices, with new gradients of zero."""
    parameter._data = arrays
    parameter._init_grad()


def state_for(parameter: mx.gluon.Parameter, trainer: mx.gluon.Trainer | None) -> dict[str, Any]:
    """What a copy of the parameter has, which `trainer` trains."""
    return {**vars(parameter), "_trainer": trainer}


def draw_first_values(parameter: mx.gluon.Parameter) -> None:
    """Initialise a parameter that has waited for its shape, which is known now."""
    parameter._finish_deferred_init()


def call_with_first_values(parameter: mx.gluon.Parameter, function: Callable[[mx.nd.NDArray], object]) -> None:
    """Call `function` with the parameter's first values, once, when it gets them."""

    def initialise(values: mx.nd.NDArray, devices: Any) -> None:
        forget_call_with_first_values(parameter)
        function(values)
        parameter._init_impl(values, devices)

    vars(parameter)[_REPLACED] = initialise


def forget_call_with_first_values(parameter: mx.gluon.Parameter) -> None:
    """Call the function of :func:`call_with_first_values` no longer."""
    vars(parameter).pop(_REPLACED, None)


def initialize_on(parameter: mx.gluon.Parameter, devices: list[mx.Context]) -> None:
    """Give the parameter these devices, in this very list, once its shape is known."""
    init, _, *rest = parameter._deferred_init
    parameter._deferred_init = (init, devices, *rest)


def share_copies(
    parameter: mx.gluon.Parameter, devices: list[mx.Context], of_copies: Sequence[Sequence[mx.Context]]
) -> None:
    """Have ``parameter.data(device)`` return copy i of the values on all devices of ``of_copies[i]``.

    Args:
        devices: of the copies, the list that :func:`devices_of_values` returns from now on.
    """
    parameter._ctx_list = devices
    parameter._ctx_map = [[], []]  # as in MXNet: for CPUs and GPUs, the number of the copy by the device's number
    for number, others in enumerate(of_copies):
        for device in others:
            numbers = parameter._ctx_map[device.device_typeid & 1]
            numbers.extend([None] * (device.device_id + 1 - len(numbers)))
            numbers[device.device_id] = number
