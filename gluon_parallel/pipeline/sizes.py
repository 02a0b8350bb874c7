"""Bytes of a stage's parameters, and of the arrays that its operators return."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..compat import mx

ArrayForm = tuple[tuple[int, ...], np.dtype]  # shape, dtype


def parameter_bytes(block: mx.gluon.Block) -> int:
    """Bytes of a block's parameters and of their gradients."""
    return sum(
        size_of(one.shape, np.dtype(one.dtype)) * (1 + (one.grad_req != "null"))
        for one in block.collect_params().values()
    )


def size_of(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Bytes of an array."""
    return int(np.prod(shape)) * dtype.itemsize


def activation_bytes(block: mx.gluon.Block, inputs: Sequence[ArrayForm]) -> int | None:
    """Bytes of all arrays that the operators of a HybridBlock return; None for another block.

    Args:
        block: the stage.
        inputs: list of (shape, dtype).
    """
    if not isinstance(block, mx.gluon.HybridBlock) or mx.util.is_np_array():
        return None
    names = [f"data{number}" for number in range(len(inputs))]
    outputs = block(*map(mx.sym.var, names))
    graph = mx.sym.Group(list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]).get_internals()
    _, shapes, _ = graph.infer_shape(**{name: shape for name, (shape, _) in zip(names, inputs)})
    _, dtypes, _ = graph.infer_type(**{name: dtype for name, (_, dtype) in zip(names, inputs)})
    variables = {*graph.list_arguments(), *graph.list_auxiliary_states()}
    outputs = zip(graph.list_outputs(), shapes, dtypes)
    return sum(size_of(shape, np.dtype(dtype)) for name, shape, dtype in outputs if name not in variables)
