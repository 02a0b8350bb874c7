"""Which copies of a Gluon parameter have a gradient since the last sum or update, and which parameters were summed.

MXNet's backward pass marks a copy as fresh (``_fresh_grad``), its Trainer takes the mark away. A sum takes the marks
away here, and notes the parameter instead: afterwards all copies hold the sum, and a mark means a later backward pass.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Callable

from ..compat import mx
from ..compat.array_types import set_zero

# As the property `_fresh_grad` of NDArray does, in half the time: a step asks for every copy of every parameter.
_get, _set = mx.base._LIB.MXNDArrayGetGradState, mx.base._LIB.MXNDArraySetGradState
_summed: weakref.WeakSet[mx.gluon.Parameter] = weakref.WeakSet()  # parameters whose copies all hold the sum
# id of a gradient array -> its parameter
_parameters: weakref.WeakValueDictionary[int, mx.gluon.Parameter] = weakref.WeakValueDictionary()


def flags(parameter: mx.gluon.Parameter) -> list[bool]:
    """Whether the gradient of each copy is fresh."""
    found, flag = [], ctypes.c_int()
    place = ctypes.byref(flag)
    for array in _copies(parameter):
        mx.base.check_call(_get(array.handle, place))
        found.append(bool(flag.value))
    return found


def mark(parameter: mx.gluon.Parameter, fresh: bool) -> None:
    """Mark the gradients of all copies as fresh, or as not."""
    flag = ctypes.c_int(fresh)
    for array in _copies(parameter):
        mx.base.check_call(_set(array.handle, flag))


def zero_stale(parameter: mx.gluon.Parameter, arrays: Iterable[mx.nd.NDArray] | None = None) -> None:
    """Where a gradient is not fresh, for its device had no samples, it becomes zero, unless gradients accumulate.

    With `arrays`, only where it is one of these.
    """
    if parameter.grad_req == "write":
        chosen = set(map(id, parameter._grad if arrays is None else arrays))
        for fresh, gradient in zip(flags(parameter), parameter._grad):
            if not fresh and id(gradient) in chosen:
                set_zero(gradient)


def note_sum(parameter: mx.gluon.Parameter) -> None:
    """All copies of the gradient hold the sum from now on."""
    mark(parameter, False)
    _summed.add(parameter)


def is_summed(parameter: mx.gluon.Parameter) -> bool:
    """Whether all copies of the gradient hold the sum, and none was used for an update since."""
    return parameter in _summed


def forget_sums(parameters: Iterable[mx.gluon.Parameter]) -> None:
    """The gradients of these parameters hold no sums from now on: an update has used them."""
    _summed.difference_update(parameters)


def forget(parameter: mx.gluon.Parameter) -> None:
    """The gradients are neither fresh nor summed from now on."""
    mark(parameter, False)
    _summed.discard(parameter)


def owner(arrays: Sequence[mx.nd.NDArray]) -> mx.gluon.Parameter | None:
    """The parameter whose gradients these arrays are, if a backward pass has written one of them since the last sum."""
    parameter = _parameters.get(id(arrays[0])) if len(arrays) > 1 else None
    if parameter is None or parameter._grad is None:
        return None
    fresh = {id(gradient): flag for gradient, flag in zip(parameter._grad, flags(parameter))}
    return parameter if all(id(array) in fresh for array in arrays) and any(fresh[id(a)] for a in arrays) else None


def _copies(parameter: mx.gluon.Parameter) -> list[mx.nd.NDArray]:
    return parameter._check_and_get(parameter._data, list)


def register(make_gradients: Callable[..., None], parameter: mx.gluon.Parameter, *args: Any, **kwargs: Any) -> None:
    """Make a parameter's gradient arrays as MXNet does, and note whose they are."""
    make_gradients(parameter, *args, **kwargs)
    _summed.discard(parameter)
    _parameters.update((id(gradient), parameter) for gradient in parameter._grad or ())
