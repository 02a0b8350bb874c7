"""Convert a net for training on CPUs: the graph that MXNet runs changes, the net and its files do not."""

import sys
from typing import Any

import numpy as np

from ..compat import mx
from .cpu_graph import rewrite
from .rewrite_graph import block_being_built

_CONVERTED = "_runs_for_cpu"  # attribute of the blocks of a converted net


def convert_for_cpu(net):
    """Replace what MXNet 1.9.1 runs slowly on CPUs, in place, and change nothing else.

    It takes effect in hybridized nets, where the graph that MXNet executes is rewritten: ReLU6 behind a batch norm,
    batch norms between convolutions that oneDNN stores in different layouts, and global average pooling. Outputs and
    gradients are the same up to rounding. The layers, the parameters with their names, files of parameters and
    exported graphs stay those of the original net. On GPUs, in float16, and in nets that are not hybridized,
    MXNet runs the original operators.

    It may be called before or after initialisation, hybridization, training and :func:`convert_sync_batchnorm`. A
    hybridized block that contains a converted one is executed as a converted one.

    Args:
        net: any block, for instance one of ``gluon.model_zoo``, one of GluonCV's, or a ``SymbolBlock``.

    Returns:
        `net`, for use in an expression.

    Example:
        >>> net = convert_for_cpu(mx.gluon.model_zoo.vision.mobilenet_v2_1_0())
        >>> net.hybridize(static_alloc=True)
    """
    blocks = _hybrid_blocks(net)
    for block in blocks:
        setattr(block, _CONVERTED, True)
    for block in blocks:
        block._clear_cached_op()  # graphs that were built already are built again at the next call
    return net


def would_convert(net):
    """What :func:`convert_for_cpu` would replace in the graphs that `net` has run so far.

    Args:
        net: any block.

    Returns:
        {pattern: how often}; empty for a net that is converted, is not hybridized, has not run yet, or has nothing
        to replace.
    """
    found: dict[str, int] = {}
    for block in _hybrid_blocks(net):
        if block._cached_op is not None and not _is_converted(block):
            for pattern, times in rewrite(block._cached_graph[1], _shapes(block)).replaced.items():
                found[pattern] = found.get(pattern, 0) + times
    return found


def suggest_for_cpu(net, devices):
    """Say on stderr that `net`, which has run on `devices`, would train faster there if it were converted.

    Args:
        net: any block, after its first forward pass.
        devices: list of ``mx.Context``; nothing is said unless all of them are CPUs.
    """
    found = would_convert(net) if all(device.device_type == "cpu" for device in devices) else {}
    if found:
        patterns = ", ".join(f"{times} x {pattern}" for pattern, times in found.items())
        print(
            f"gluon_parallel: {type(net).__name__} would train faster on CPUs after gp.nn.convert_for_cpu(net), which "
            f"changes neither its values nor its files ({patterns})",
            file=sys.stderr,
        )


def _hybrid_blocks(net):
    found: dict[int, mx.gluon.HybridBlock] = {}
    net.apply(lambda block: found.update({id(block): block} if isinstance(block, mx.gluon.HybridBlock) else {}))
    return list(found.values())


def _is_converted(net):
    return any(getattr(block, _CONVERTED, False) for block in _hybrid_blocks(net))


def _shapes(block):
    return {name: parameter.shape or () for name, parameter in block.collect_params().items()}


_Executor: Any = mx.nd.CachedOp


class _CachedOp(_Executor):
    """MXNet's executor of hybridized graphs; for a converted net it runs the rewritten graph where that is faster."""

    def __init__(self, sym, flags=(), *args, **kwargs):
        block, running = block_being_built(), sym
        if block is not None and _is_converted(block) and not mx.util.is_np_array():
            running = rewrite(sym, _shapes(block)).symbol
        super().__init__(running, flags, *args, **kwargs)
        self._original = None if running is sym else _Executor(sym, flags, *args, **kwargs)
        self._first_input = dict(flags).get("data_indices", [0])[0]

    def __call__(self, *args, **kwargs):
        if self._original is not None and not _is_faster_on(args[self._first_input]):
            return self._original(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _register_op_hook(self, *args, **kwargs):
        if self._original is not None:
            self._original._register_op_hook(*args, **kwargs)
        super()._register_op_hook(*args, **kwargs)


def _is_faster_on(x):
    """Whether the rewritten graph is meant for this input: on a CPU, in single or double precision."""
    return x.context.device_type.startswith("cpu") and x.dtype in (np.float32, np.float64)


# Gluon's blocks look the class up in mxnet.ndarray each time they build a graph.
mx.nd.CachedOp = _CachedOp
