"""What a ``gluon.Block`` keeps to itself: its own parameters, its children, its options, and its graph and executor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, Callable

from .compat import mx

_OfBlock = Callable[["mx.gluon.Block"], Any]

own_parameters: _OfBlock = attrgetter("_reg_params")  # {name within the block: parameter}, without the children's

# Of a hybridized block.
executor_of: _OfBlock = attrgetter("_cached_op")  # None before its first call
backend_of: _OfBlock = attrgetter("_backend")  # that of `optimize_for`, which has the executor made anew; None
executor_inputs: _OfBlock = attrgetter("_cached_op_args")  # (whether it is an input, its number or the parameter)
flags_of: _OfBlock = attrgetter("_flags")  # pairs, as of the keywords of `hybridize`
output_structure: _OfBlock = attrgetter("_out_format")  # for `unflatten`

Executor: Any = mx.nd._internal.CachedOp  # MXNet's own class, whatever `mx.nd.CachedOp` is
NumPySymbol: Any = mx.sym.np._Symbol  # the class of symbols in NumPy mode
# (nested, what it is) -> (list, structure), and (list, structure) -> (nested, what is left of the list)
flatten: Callable[[Any, str], tuple[list, Any]] = mx.gluon.block._flatten
unflatten: Callable[[list, Any], tuple[Any, list]] = mx.gluon.block._regroup


def classes_of(loss: Any) -> tuple[int, float | None] | None:
    """(axis of the outputs that counts classes, label that is left out or None) of a loss with classes as labels.

    None for other losses. One that is neither MXNet's nor GluonCV's says it by `class_axis` and `ignored_label`.
    """
    if type(loss) is mx.gluon.loss.SoftmaxCrossEntropyLoss:
        return (loss._axis, None) if loss._sparse_label else None
    if type(loss).__module__ == "gluoncv.loss" and hasattr(loss, "_ignore_label"):  # of segmentation
        return (1, loss._ignore_label) if loss._sparse_label else None
    axis = getattr(loss, "class_axis", None)
    return None if axis is None else (axis, getattr(loss, "ignored_label", None))


def children_of(block: mx.gluon.Block) -> Iterable[mx.gluon.Block]:
    """The blocks that are the block's direct children, in their order."""
    return block._children.values()


def parameters_by_structure(block: mx.gluon.Block) -> dict[str, mx.gluon.Parameter]:
    """The parameters of a block and all below it by their names in files, such as ``features.0.weight``."""
    return block._collect_params_with_prefix()


def options_of(layer: mx.gluon.Block) -> dict[str, Any]:
    """What a layer of one operator passes to it; empty for other blocks."""
    return getattr(layer, "_kwargs", {})


def set_options(layer: mx.gluon.Block, options: Mapping[str, Any]) -> None:
    """Set what :func:`options_of` returns."""
    layer._kwargs = dict(options)


def is_hybridized(block: mx.gluon.Block) -> bool:
    """Whether the block runs as a graph; False for blocks that cannot."""
    return getattr(block, "_active", False)


def traced_graph(block: mx.gluon.Block) -> tuple:
    """(symbols of the inputs, symbol of the outputs) of a block that has run as a graph; empty for others."""
    return getattr(block, "_cached_graph", ())


def trace(block: mx.gluon.HybridBlock, *args: Any) -> tuple:
    """As :func:`traced_graph`; the graph is traced with these inputs if there is none."""
    return block._get_graph(*args)


def forget_graph(block: mx.gluon.HybridBlock) -> None:
    """Have the block trace its graph anew, and make another executor, at its next call."""
    block._clear_cached_op()


def infer_shapes(block: mx.gluon.HybridBlock, *args: Any) -> None:
    """Set the shapes of the parameters that follow from these inputs; raises MXNet's errors."""
    block._deferred_infer_shape(*args)


def add_hook(executor: Any, *args: Any, **kwargs: Any) -> None:
    """Have the executor call a function with the values in its graph, as ``Block.register_op_hook``."""
    executor._register_op_hook(*args, **kwargs)
