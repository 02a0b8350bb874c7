"""Gradients of all copies of Gluon parameters: which are fresh, which are summed; setting to zero, clipping.

A backward pass marks the copies that it writes as fresh (:mod:`.marks`), MXNet's Trainer takes the marks away. A sum
takes them away here, and notes the parameter instead: all copies hold the sum then, and a mark means another pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Callable

import numpy as np

from ..errors import GradientUnavailable
from ..mxnet.arrays import multiply
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import as_legacy, set_zero, to_device
from ..mxnet.engine import push, view
from ..mxnet.parameters import devices_of_values, gradients_of, has_values, set_values, state_for, trainer_of, values_of
from ..mxnet.trainers import parameters_of, store_of
from ..native import function
from . import written
from .marks import flags, of_parameter, set_marks

_note_new_gradients = function("gp_note_new_gradients", 0, keeps_lock=True)
# The parameters whose gradients all hold the sum, which no update has used.
summed: weakref.WeakSet[mx.gluon.Parameter] = weakref.WeakSet()
# Those of which clip_global_norm was given one copy alone, before the sum.
clipped: weakref.WeakSet[mx.gluon.Parameter] = weakref.WeakSet()
# How often gradients of any parameter were made, or left out; for each parameter, that number when its were made last.
num_changes = 0
numbers: weakref.WeakKeyDictionary[mx.gluon.Parameter, int] = weakref.WeakKeyDictionary()
# id of an array, a gradient or a value -> its parameter
_parameters: weakref.WeakValueDictionary[int, mx.gluon.Parameter] = weakref.WeakValueDictionary()
_grad_req_in_mxnet = mx.gluon.Parameter.grad_req


def mark(parameter: mx.gluon.Parameter, fresh: bool) -> None:
    """Mark the gradients of all copies as fresh, or as not."""
    marks, number = of_parameter(parameter)
    set_marks(marks.record, number, number + 1, fresh)


def zero_stale(parameter: mx.gluon.Parameter, arrays: Iterable[mx.nd.NDArray]) -> None:
    """Set those of these gradients to 0 that are not fresh, for their device had no samples, unless they accumulate."""
    if parameter.grad_req == "write":
        chosen = set(map(id, arrays))
        for fresh, gradient in zip(flags(parameter), gradients_of(parameter)):
            if not fresh and id(gradient) in chosen:
                set_zero(gradient)


def refuse_second_sum(parameter: mx.gluon.Parameter) -> None:
    """Refuse to sum gradients to which backward passes have added since the last sum, which all copies hold."""
    if parameter.grad_req == "add" and parameter in summed:
        raise GradientUnavailable(
            f"the gradients of {parameter.name} hold a sum, to which a backward pass has added (grad_req='add'). Sum "
            "once for each update, after its last backward pass: trainer.allreduce_grads(), "
            "trainer.update(num_samples), net.collect_params().zero_grad()"
        )


def set_to_zero(zero_grad: Callable[..., None], target: mx.gluon.Parameter | mx.gluon.ParameterDict) -> None:
    """Set gradients to zero as MXNet does; they hold no sum then."""
    zero_grad(target)
    for parameter in target.values() if isinstance(target, mx.gluon.ParameterDict) else [target]:
        clipped.discard(parameter)
        if parameter in summed:
            summed.discard(parameter)
            mark(parameter, True)  # as on one device, where zero_grad leaves the marks


def use_sums(parameters: Iterable[mx.gluon.Parameter], is_first: bool) -> None:
    """An update has used the sums that these parameters' gradients hold.

    Where the next backward pass adds to them, one copy alone keeps the sum, so that the next sum counts it once: that
    of the first device, in the process that `is_first`.
    """
    for parameter in parameters:
        if parameter.grad_req == "add" and parameter in summed:
            for gradient in parameter.list_grad()[is_first:]:
                set_zero(gradient)
    summed.difference_update(parameters)


def refuse_different_copies(parameter: mx.gluon.Parameter) -> None:
    """Queue a check that the copies of a summed gradient are equal; what reads them later raises that they are not."""
    copies = list(map(as_legacy, parameter.list_grad()))
    if len(copies) < 2 or any(one.stype != "default" or one.ctx.device_type != "cpu" for one in copies):
        return

    def check() -> None:
        first, *others = (view(array).reshape(-1).view(np.uint8) for array in copies)  # bytes: NaN equals itself
        for other, array in zip(others, copies[1:]):
            if not np.array_equal(other, first):
                raise GradientUnavailable(
                    f"the gradients of {parameter.name} on {copies[0].ctx} and {array.ctx} were summed, and then one "
                    "of them was changed. Change all copies alike, such as gluon.utils.clip_global_norm([gradient for "
                    "parameter in parameters for gradient in parameter.list_grad()], largest)"
                )

    push(check, write=copies, name="gluon_parallel.equal gradients")


def forget(parameters: Iterable[mx.gluon.Parameter]) -> None:
    """Discard the gradients of earlier backward passes, the caller's own or those of a step that failed."""
    for parameter in parameters:
        mark(parameter, False)
        summed.discard(parameter)
        clipped.discard(parameter)
        if parameter.grad_req == "add":
            for gradient in parameter.list_grad():
                set_zero(gradient)


def trainable(trainer: mx.gluon.Trainer) -> list[mx.gluon.Parameter]:
    """The trainer's parameters that have a gradient."""
    return [parameter for parameter in parameters_of(trainer) if parameter.grad_req != "null"]


def clip(gradients: Iterable[Sequence[mx.nd.NDArray]], largest: float, rescale: float = 1.0) -> mx.nd.NDArray:
    """Scale all gradients together, so that `rescale` times their norm is at most `largest`; returns what it was, (1,).

    They are a list of equal copies for each parameter. It waits only if one of them is row_sparse.
    """
    gradients = [list(map(as_legacy, copies)) for copies in gradients]
    first = [copies[0] for copies in gradients]
    norm = mx.nd.add_n(*map(_sum_of_squares, first)).sqrt() * rescale
    scale = mx.nd.minimum(largest / (norm + 1e-12), 1.0)
    for copies in gradients if largest < float("inf") else ():
        for gradient in copies:
            if gradient.stype != "default":  # no operator takes them and an array of one value
                multiply(gradient, float(scale.asscalar()))
                continue
            factor = scale.as_in_context(gradient.context).astype(gradient.dtype)
            mx.nd.broadcast_mul(gradient, factor.reshape((1,) * gradient.ndim), out=gradient)
    return norm


def _sum_of_squares(gradient: mx.nd.NDArray) -> mx.nd.NDArray:
    """(1,) float32 on its device."""
    if gradient.stype != "default":
        return (mx.nd.norm(gradient) ** 2).astype("float32")
    wide = gradient.astype("float64" if gradient.dtype == np.float64 else "float32")
    return (wide**2).sum().astype("float32")


def clip_global_norm(
    clip_in_mxnet: Callable[..., Any], arrays: Sequence[mx.nd.NDArray], *args: Any, **kwargs: Any
) -> Any:
    """Clip as ``gluon.utils.clip_global_norm``, but count a gradient once that is there on several devices."""
    firsts: dict[mx.gluon.Parameter, mx.nd.NDArray] = {}
    counted, copies, alone = [], [], set()
    for array in arrays:
        parameter, what = owner_of(array) or (None, "")
        parameter = parameter if what == "gradient" else None
        first = array if parameter is None else firsts.setdefault(parameter, array)
        is_sum = parameter in summed and not any(flags(parameter))
        if parameter is not None and not is_sum:
            alone.add(parameter)
        if parameter is None or first is array:
            counted.append(array)
            continue
        copies.append((first, array))
        if not is_sum and first.asnumpy().tobytes() != array.asnumpy().tobytes():
            raise GradientUnavailable(
                f"clip_global_norm got the gradients of {parameter.name} on {first.ctx} and {array.ctx}, which are not "
                "summed; before it, call trainer.allreduce_grads(), or gp.allreduce(parameter.list_grad()) for each"
            )
    clipped.update(alone)
    norm = clip_in_mxnet(counted, *args, **kwargs)
    for first, array in copies:
        as_legacy(first).copyto(as_legacy(array))
    return norm


def refuse_clipped(parameters: Iterable[mx.gluon.Parameter], over_processes: bool) -> None:
    """Refuse, once, a sum of gradients that were clipped before it, each by the norm of one device's alone."""
    found = clipped.intersection(parameters)
    clipped.difference_update(found)
    for parameter in found:
        if over_processes or sum(flags(parameter)) > 1:
            raise GradientUnavailable(
                f"clip_global_norm has clipped gradients of {parameter.name} before they were summed, by the norm of "
                f"those of one {'process' if over_processes else 'device'}. Clip the sums: trainer.allreduce_grads(), "
                "gluon.utils.clip_global_norm([gradient for parameter in parameters for gradient in "
                "parameter.list_grad()], largest), trainer.update(num_samples). A trainer whose store updates cannot: "
                "leave update_on_kvstore=True out; MXNet's servers need update_on_kvstore=False"
            )


def owner_of(array: mx.nd.NDArray) -> tuple[mx.gluon.Parameter, str] | None:
    """The parameter whose ``"gradient"`` or ``"value"`` this array is on one of its devices, and which of both."""
    parameter = _parameters.get(id(array))
    if parameter is not None:
        for what, copies in (("gradient", gradients_of(parameter)), ("value", values_of(parameter))):
            if any(array is one for one in copies or ()):
                return parameter, what
    return None


def owner(arrays: Sequence[mx.nd.NDArray]) -> mx.gluon.Parameter | None:
    """The parameter whose gradients these arrays are, if a backward pass has written one of them since the last sum."""
    parameter = _parameters.get(id(arrays[0])) if len(arrays) > 1 else None
    if parameter is None or gradients_of(parameter) is None:
        return None
    fresh = {id(gradient): flag for gradient, flag in zip(gradients_of(parameter), flags(parameter))}
    return parameter if all(id(array) in fresh for array in arrays) and any(fresh[id(a)] for a in arrays) else None


def register(make_gradients: Callable[..., None], parameter: mx.gluon.Parameter, *args: Any, **kwargs: Any) -> None:
    """Make a parameter's gradient arrays as MXNet does, and note whose they and its values are."""
    global num_changes
    make_gradients(parameter, *args, **kwargs)
    num_changes += 1
    numbers[parameter] = num_changes
    if parameter.shape is None and values_of(parameter):  # that of an imported graph, to which MXNet gives values alone
        parameter.shape = values_of(parameter)[0].shape
    summed.discard(parameter)
    clipped.discard(parameter)
    _note_new_gradients()
    written.note(parameter)
    _parameters.update(
        (id(array), parameter) for array in (*(gradients_of(parameter) or ()), *(values_of(parameter) or ()))
    )


def copied(parameter: mx.gluon.Parameter) -> dict[str, Any]:
    """What a copy, or a pickle, of a parameter takes over: not a trainer with a store, which cannot be copied."""
    trainer = trainer_of(parameter)
    return state_for(parameter, None if trainer is None or store_of(trainer) is not None else trainer)


def _set_grad_req(parameter: mx.gluon.Parameter, request: str) -> None:
    global num_changes
    _grad_req_in_mxnet.fset(parameter, request)
    num_changes += 1


# MXNet's property, whose changes are counted.
grad_req = property(_grad_req_in_mxnet.fget, _set_grad_req, doc=_grad_req_in_mxnet.__doc__)


def restore(parameter: mx.gluon.Parameter, state: dict[str, Any]) -> None:
    """Make a parameter of a pickle, or a copy, of another one; its gradients are new ones of zero.

    MXNet's pickles of arrays do not say that one array is another's gradient, so nothing could go backward to them, and
    have the arrays of all CPU devices on the first one.
    """
    vars(parameter).update(state)
    if has_values(parameter):
        devices = devices_of_values(parameter)
        set_values(parameter, [to_device(one, device) for one, device in zip(values_of(parameter), devices)])
