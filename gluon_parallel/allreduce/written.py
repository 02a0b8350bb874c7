"""Count of what the caller writes into parameters between steps: other arrays, on other devices too, or values."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..mxnet.compat import mx

num = 0  # how often any parameter was written
_last: weakref.WeakKeyDictionary[mx.gluon.Parameter, int] = weakref.WeakKeyDictionary()  # `num` when it was written


def note(parameter: mx.gluon.Parameter) -> None:
    """A parameter was written."""
    global num
    num += 1
    _last[parameter] = num


def since(parameter: mx.gluon.Parameter, before: int) -> bool:
    """Whether a parameter was written since `num` was `before`."""
    return _last.get(parameter, 0) > before


def set_data(set_in_mxnet: Callable[..., None], parameter: mx.gluon.Parameter, *args: Any, **kwargs: Any) -> None:
    """Set a parameter's value as MXNet does."""
    set_in_mxnet(parameter, *args, **kwargs)
    note(parameter)
