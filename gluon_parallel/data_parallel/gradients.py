"""Gradients of all copies of a trainer's parameters: which are fresh, setting them to zero, clipping their norm."""

import numpy as np

from ..compat import mx
from ..compat.array_types import as_legacy, set_zero


def trainable(trainer):
    """The trainer's parameters that have a gradient."""
    return [parameter for parameter in trainer._params if parameter.grad_req != "null"]


def reached(trainer):
    """Those that the last backward pass has reached on any device."""
    return [parameter for parameter in trainable(trainer) if any(array._fresh_grad for array in parameter.list_data())]


def forget(trainer):
    """Whatever gradients there are, from a backward pass of the caller's own or a broken step, do not count."""
    for parameter in trainable(trainer):
        for array in parameter.list_data():
            array._fresh_grad = False
        if parameter.grad_req == "add":
            for gradient in parameter.list_grad():
                set_zero(gradient)


def complete(parameters):
    """Where a copy has no fresh gradient, because its device had no samples, its gradient becomes zero."""
    for parameter in parameters:
        for array, gradient in zip(parameter.list_data(), parameter.list_grad()):
            if not array._fresh_grad:
                if parameter.grad_req == "write":
                    set_zero(gradient)
                array._fresh_grad = True


def clip(parameters, largest, rescale):
    """Scale all gradients together, so that `rescale` times their norm is at most `largest`; does not wait."""
    # Every device holds the same gradients now, so the first device's norm is everybody's.
    gradients = [[as_legacy(gradient) for gradient in parameter.list_grad()] for parameter in parameters]
    first = [copies[0] for copies in gradients]
    squares = [gradient.astype("float64" if gradient.dtype == np.float64 else "float32") ** 2 for gradient in first]
    norm = mx.nd.add_n(*[square.sum().astype("float32") for square in squares]).sqrt() * rescale
    scale = mx.nd.minimum(largest / (norm + 1e-12), 1.0)
    for copies in gradients:
        for gradient in copies:
            factor = scale.as_in_context(gradient.context).astype(gradient.dtype)
            mx.nd.broadcast_mul(gradient, factor.reshape((1,) * gradient.ndim), out=gradient)
