"""Gradients of all copies of a trainer's parameters: which are fresh, setting them to zero, clipping their norm."""

from collections.abc import Iterable, Sequence

import numpy as np

from ..allreduce import fresh_gradients as fresh
from ..compat import mx
from ..compat.array_types import as_legacy, set_zero


def trainable(trainer: mx.gluon.Trainer) -> list[mx.gluon.Parameter]:
    """The trainer's parameters that have a gradient."""
    return [parameter for parameter in trainer._params if parameter.grad_req != "null"]


def reached(trainer: mx.gluon.Trainer) -> list[mx.gluon.Parameter]:
    """The trainer's parameters that the last backward pass has reached on any device."""
    return [parameter for parameter in trainable(trainer) if any(fresh.flags(parameter))]


def forget(trainer: mx.gluon.Trainer) -> None:
    """Discard the gradients of earlier backward passes, the caller's own or those of a step that failed."""
    for parameter in trainable(trainer):
        fresh.forget(parameter)
        if parameter.grad_req == "add":
            for gradient in parameter.list_grad():
                set_zero(gradient)


def complete(parameters: Iterable[mx.gluon.Parameter]) -> None:
    """Where a copy has no fresh gradient, because its device had no samples, its gradient becomes zero."""
    for parameter in parameters:
        fresh.zero_stale(parameter)
        fresh.mark(parameter, True)


def wait(parameters: Iterable[mx.gluon.Parameter]) -> None:
    """Wait for the gradients of all copies; raises what has kept one of them from being computed or summed."""
    for parameter in parameters:
        for gradient in parameter.list_grad():
            gradient.wait_to_read()


def clip(parameters: Sequence[mx.gluon.Parameter], largest: float, rescale: float) -> None:
    """Scale all gradients together, so that `rescale` times their norm is at most `largest`; does not wait."""
    # Every device holds the same gradients now, so the norm on the first device is that on all.
    gradients = [[as_legacy(gradient) for gradient in parameter.list_grad()] for parameter in parameters]
    first = [copies[0] for copies in gradients]
    squares = [gradient.astype("float64" if gradient.dtype == np.float64 else "float32") ** 2 for gradient in first]
    norm = mx.nd.add_n(*[square.sum().astype("float32") for square in squares]).sqrt() * rescale
    scale = mx.nd.minimum(largest / (norm + 1e-12), 1.0)
    for copies in gradients:
        for gradient in copies:
            factor = scale.as_in_context(gradient.context).astype(gradient.dtype)
            mx.nd.broadcast_mul(gradient, factor.reshape((1,) * gradient.ndim), out=gradient)
