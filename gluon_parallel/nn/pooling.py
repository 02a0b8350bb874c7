"""Global average pooling whose backward pass is fast on CPUs."""

from __future__ import annotations

from ..compat import mx
from .convert import _blocks, _forget_graphs

_Plain = mx.gluon.nn.GlobalAvgPool2D


class GlobalAvgPool2D(_Plain):  # type: ignore[misc, valid-type]
    """``gluon.nn.GlobalAvgPool2D`` over (N, C, H, W), with a backward pass that is much faster on CPUs.

    Where a hybridized net keeps images in oneDNN's layout, the backward passes of Gluon's layer and of the batch norm
    before it take some hundred times as long as with other gradients; most likely MXNet 1.9.1 takes a gradient of 1 x 1
    pixels for one in another layout.
    This layer's operators are not oneDNN's. In float16 the sum of a row of pixels must stay below 65,504.

    Example:
        >>> GlobalAvgPool2D()(mx.nd.arange(8).reshape((1, 2, 2, 2))).reshape(-1).asnumpy().tolist()
        [1.5, 5.5]
    """

    def hybrid_forward(self, F, x):
        # One axis after the other: float16 holds the sum of a row where it would not hold that of a whole image.
        return F.mean(F.mean(x, axis=3, keepdims=True), axis=2, keepdims=True, name="fwd")


def convert_global_pooling(net):
    """Turn every ``gluon.nn.GlobalAvgPool2D`` of `net` into :class:`GlobalAvgPool2D`, in place.

    Worth it where a hybridized net of convolutions and batch norms ends so, as ResNets do, and trains on CPUs: a step
    of ``cifar_resnet20_v1`` then takes about two thirds of the processor time. Checkpoints fit both ways.

    Args:
        net: any block; it may itself be such a layer. Layers of a class of their own, or over (N, H, W, C), stay.

    Returns:
        `net`, for use in an expression.

    Example:
        >>> net = mx.gluon.nn.HybridSequential()
        >>> net.add(mx.gluon.nn.GlobalAvgPool2D())
        >>> isinstance(convert_global_pooling(net)[0], GlobalAvgPool2D)
        True
    """
    layers = [block for block in _blocks(net) if type(block) is _Plain and block._kwargs.get("layout") == "NCHW"]
    for layer in layers:
        layer.__class__ = GlobalAvgPool2D
    _forget_graphs(net, layers)
    return net
