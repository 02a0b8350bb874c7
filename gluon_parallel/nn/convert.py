"""Conversion of a net's layers in place, and of MXNet's SyncBatchNorm in scripts that cannot be edited."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any, Callable

from ..errors import warn
from ..kvstore import check_sync_group
from ..mxnet.blocks import forget_graph, options_of, own_parameters, set_options
from ..mxnet.compat import mx
from ..mxnet.compat.replacing import named_arguments, stands_for
from ..mxnet.parameters import is_initialized
from .blocks import blocks_of
from .sync_batch_norm.graph import sync_batch_norm_symbol
from .sync_batch_norm.layer import SyncBatchNorm
from .sync_batch_norm.sync_group import GROUPS

CONTRIB, _CONTRIB_SYMBOL = mx.gluon.contrib.nn.SyncBatchNorm, mx.sym.contrib.SyncBatchNorm
_SYMBOLS_ARGUMENTS = inspect.signature(_CONTRIB_SYMBOL)
_CONVERTIBLE = (mx.gluon.nn.BatchNorm, CONTRIB)
_POOLING = mx.gluon.nn.GlobalAvgPool2D
_has_warned = False


def convert_sync_batchnorm(
    net: mx.gluon.Block,
    num_devices: int | None = None,
    kvstore: Any = None,
    timeout: float | None = None,
    group: str | int | None = None,
) -> mx.gluon.Block:
    """Turn every BatchNorm layer of `net` (and MXNet's contrib SyncBatchNorm) into a SyncBatchNorm, in place.

    Parameters stay the same objects with their names, values and gradient settings, so a trainer that holds them
    stays valid; the net may be initialised or not, trained or not.

    Args:
        net: any block; it may itself be a BatchNorm layer.
        num_devices, kvstore, timeout, group: see :class:`SyncBatchNorm`.

    Returns:
        `net`, for use in an expression.

    Raises:
        TypeError: `net` contains a layer that cannot be converted; names it and says why. Nothing has been changed.

    Example:
        >>> net = mx.gluon.nn.HybridSequential()
        >>> net.add(mx.gluon.nn.Dense(4), mx.gluon.nn.BatchNorm())
        >>> type(convert_sync_batchnorm(net)[1]).__name__
        'SyncBatchNorm'
        >>> type(revert_sync_batchnorm(net)[1]).__name__
        'BatchNorm'
    """
    check_sync_group(group, "convert_sync_batchnorm")
    layers = [block for block in blocks_of(net) if type(block) in _CONVERTIBLE]
    for block in blocks_of(net):
        if isinstance(block, mx.gluon.nn.BatchNorm) and type(block) not in (*_CONVERTIBLE, *_OURS):
            raise TypeError(
                f"{block.name}: {type(block).__name__} is a BatchNorm of another kind, whose own forward pass would be "
                "lost; replace it in the net's code"
            )
        if isinstance(block, mx.gluon.SymbolBlock) and _has_batch_norm(block):
            raise TypeError(
                f"{block.name}: a SymbolBlock's graph is fixed, with plain BatchNorm in it; build it from a net that "
                "has SyncBatchNorm layers, or with gp.nn.sync_batch_norm_symbol"
            )
        if getattr(block, "fuse_relu", False):
            raise TypeError(f"{block.name}: BatchNormReLU has a fused activation; use BatchNorm and Activation")
    for layer in layers:
        if type(layer) is CONTRIB:
            kept = {name: options_of(layer)[name] for name in ("eps", "momentum", "fix_gamma", "use_global_stats")}
            set_options(layer, {**kept, "axis": 1})
    _change_class(net, layers, SyncBatchNorm)
    for layer in layers:
        layer._synchronise(num_devices, kvstore, timeout, group)
    return net


def revert_sync_batchnorm(net: mx.gluon.Block) -> mx.gluon.Block:
    """Turn every SyncBatchNorm layer of `net` back into `gluon.nn.BatchNorm`, in place; parameters stay as they are.

    Returns:
        `net`, for use in an expression.
    """
    return _change_class(
        net, [block for block in blocks_of(net) if isinstance(block, SyncBatchNorm)], mx.gluon.nn.BatchNorm
    )


def convert_global_pooling(net: mx.gluon.Block) -> mx.gluon.Block:
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
    layers = [
        block for block in blocks_of(net) if type(block) is _POOLING and options_of(block).get("layout") == "NCHW"
    ]
    return _change_class(net, layers, GlobalAvgPool2D)


def _has_batch_norm(block: mx.gluon.SymbolBlock) -> bool:
    return any(name.endswith(("running_mean", "moving_mean")) for name in own_parameters(block)) and not any(
        GROUPS.of(parameter) is not None for parameter in own_parameters(block).values()
    )


def _change_class(net: mx.gluon.Block, layers: list[mx.gluon.Block], kind: type) -> mx.gluon.Block:
    """Make `layers` of `net` layers of that class, in place: blocks, hooks and trainers hold these objects."""
    for layer in layers:
        layer.__class__ = kind
    if layers:  # the cached graphs were traced with the old ones
        for block in blocks_of(net):
            if isinstance(block, mx.gluon.HybridBlock) and not isinstance(block, mx.gluon.SymbolBlock):
                forget_graph(block)
    return net


class GlobalAvgPool2D(mx.gluon.nn.GlobalAvgPool2D):
    """``gluon.nn.GlobalAvgPool2D`` over (N, C, H, W), with a backward pass that is much faster on CPUs.

    Where a hybridized net keeps images in oneDNN's layout, the backward passes of Gluon's layer and of the batch norm
    before it take some hundred times as long as with other gradients; most likely MXNet 1.9.1 takes a gradient of 1 x 1
    pixels for one in another layout. This layer's operators are not oneDNN's. In float16 the sum of a row of pixels
    must stay below 65,504.

    Example:
        >>> GlobalAvgPool2D()(mx.nd.arange(8).reshape((1, 2, 2, 2))).reshape(-1).asnumpy().tolist()
        [1.5, 5.5]
    """

    def hybrid_forward(self, F: ModuleType, x: Any) -> Any:
        # One axis after the other: float16 holds the sum of a row where it would not hold that of a whole image.
        if mx.util.is_np_array():
            return F.np.mean(F.np.mean(x, axis=3, keepdims=True), axis=2, keepdims=True)
        return F.mean(F.mean(x, axis=3, keepdims=True), axis=2, keepdims=True, name="fwd")


class ContribSyncBatchNorm(SyncBatchNorm):
    """:class:`.SyncBatchNorm` with the arguments and the parameters' names of ``gluon.contrib.nn.SyncBatchNorm``.

    Args:
        num_devices: ignored; the devices that the layer is initialised on take part.
        in_channels, args, kwargs: as in ``gluon.contrib.nn.SyncBatchNorm``.
    """

    def __init__(self, in_channels: int = 0, num_devices: int | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(1, *args, in_channels=in_channels, **kwargs)  # axis 1

    def _alias(self) -> str:
        return "syncbatchnorm"


functools.update_wrapper(ContribSyncBatchNorm.__init__, CONTRIB.__init__)
ContribSyncBatchNorm.__name__ = CONTRIB.__name__  # which its layers show; pickle finds it by the other name
_OURS = SyncBatchNorm, ContribSyncBatchNorm


@stands_for(_CONTRIB_SYMBOL, mx.sym.contrib, "SyncBatchNorm")
def contrib_symbol(*args: Any, **kwargs: Any) -> mx.sym.Symbol:
    """:func:`.sync_batch_norm_symbol` with the arguments of ``mx.sym.contrib.SyncBatchNorm``; `key` is ignored.

    Raises:
        ValueError: `output_mean_var` is true.
    """
    given = {"ndev": 1, **named_arguments(_SYMBOLS_ARGUMENTS, args, kwargs)}
    given.pop("key", None)
    if given.pop("output_mean_var", False):
        raise ValueError("mx.sym.contrib.SyncBatchNorm: gluon_parallel's has no output_mean_var=True; leave it out")
    return sync_batch_norm_symbol(**given)


def replace_contrib() -> None:
    """Replace ``gluon.contrib.nn.SyncBatchNorm`` and ``mx.sym.contrib.SyncBatchNorm`` by ours.

    Call it before the import of packages that import these names, such as GluonCV: they would keep MXNet's.
    """
    mx.gluon.contrib.nn.SyncBatchNorm = mx.gluon.contrib.nn.basic_layers.SyncBatchNorm = ContribSyncBatchNorm
    mx.sym.contrib.SyncBatchNorm = contrib_symbol


def warn_of_contrib(
    hybrid_forward: Callable[..., Any], layer: mx.gluon.contrib.nn.SyncBatchNorm, *args: Any, **kwargs: Any
) -> Any:
    """Run MXNet's layer; warn, once in a program, when it is used on several CPU devices."""
    global _has_warned
    if not _has_warned and mx.autograd.is_training() and options_of(layer)["ndev"] > 1:
        mean = layer.running_mean
        devices = mean.list_ctx() if is_initialized(mean) else []
        if len(devices) > 1 and devices[0].device_type == "cpu":
            _has_warned = True
            warn(
                f"{layer.name}: MXNet's SyncBatchNorm on {len(devices)} CPU devices deadlocks in most nets; "
                "unequal shards make it wrong. Use gp.nn.SyncBatchNorm or gp.nn.convert_sync_batchnorm(net); for a "
                "script that cannot be edited: gluon-parallel run --sync-batch-norm ours script.py (or launch)",
                UserWarning,
            )
    return hybrid_forward(layer, *args, **kwargs)
