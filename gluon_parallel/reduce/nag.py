"""MXNet's update by NAG, whatever memory layout a weight is in."""

from __future__ import annotations

from typing import Any, Callable

from ..mxnet import engine
from ..mxnet.compat import mx


def update(call_in_mxnet: Callable[..., Any], weight: mx.nd.NDArray, *arguments: Any, **options: Any) -> Any:
    """MXNet's ``nag_mom_update`` of a weight in the plain layout.

    A convolution that predicts leaves its weight in oneDNN's layout, and the update then writes to a plain copy. It
    reads the weight once more after it has written it: the old value in one case, the new one in the other. So the
    momentum of a device that has predicted, and then its weights, would differ from those of another device.
    """
    engine.make_plain(weight)
    return call_in_mxnet(weight, *arguments, **options)
