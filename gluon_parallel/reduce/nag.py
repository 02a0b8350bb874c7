"""Update by NAG that does not depend on the memory layout of the weight."""

from __future__ import annotations

from typing import Any, Callable

from ..mxnet import engine
from ..mxnet.compat import mx


def update(call_in_mxnet: Callable[..., Any], weight: mx.nd.NDArray, *arguments: Any, **options: Any) -> Any:
    """MXNet's ``nag_mom_update`` of a weight that is in the plain layout.

    A convolution that predicts leaves its weight in oneDNN's layout. With weight decay, MXNet's function reads the
    weight again after it has written the new one: in the plain layout it finds the new value, in oneDNN's, where it
    writes to a copy, the old one. So the weights of a device that has predicted would differ from those of the others.
    """
    if options.get("wd"):
        engine.make_plain(weight)
    return call_in_mxnet(weight, *arguments, **options)
