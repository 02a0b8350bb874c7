"""Convert a net for training on CPUs: the graph that MXNet runs changes, the net and its files do not."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from ..errors import LOG
from ..mxnet.attached import Attached
from ..mxnet.blocks import executor_of, forget_graph, is_hybridized, traced_graph
from ..mxnet.compat import mx
from .blocks import blocks_of
from .cpu_graph import rewrite

_converted: Attached[bool] = Attached("runs_for_cpu", is_copied=True)  # the blocks of converted nets


def convert_for_cpu(net: mx.gluon.Block) -> mx.gluon.Block:
    """Replace what MXNet 1.9.1 runs slowly on CPUs, in place, and change nothing else.

    It takes effect in hybridized nets, where the graph that MXNet executes is rewritten: ReLU6 behind a batch norm,
    batch norms between convolutions that oneDNN stores in different layouts, global average pooling, and convolutions
    and pooling whose channels do not fill the blocks of oneDNN's layouts. Outputs and gradients are the same up to
    rounding. The layers, the parameters with their names, files of parameters and exported graphs stay those of the
    original net. On GPUs, in float16, and in nets that are not hybridized, MXNet runs the original operators.

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
        _converted.set(block, True)
    for block in blocks:
        forget_graph(block)  # graphs that were built already are built again at the next call
    return net


def would_convert(net: mx.gluon.Block) -> dict[str, int]:
    """What :func:`convert_for_cpu` would replace in the graphs that `net` has run so far.

    Args:
        net: any block.

    Returns:
        {pattern: how often}; empty for a net that is converted, is not hybridized, has not run yet, or has nothing
        to replace.
    """
    return _patterns(net, of_converted=False)


def convert_by_default(net: mx.gluon.Block, devices: Sequence[mx.Context]) -> bool:
    """Convert a net that :class:`DataParallel` is about to train, if it is hybridized and all devices are CPUs.

    Returns:
        Whether it was converted now. The environment variable ``GLUON_PARALLEL_CONVERT_FOR_CPU=0`` forbids it.
    """
    on_cpus = all(device.device_type == "cpu" for device in devices)
    if os.environ.get("GLUON_PARALLEL_CONVERT_FOR_CPU") == "0" or not on_cpus or _is_converted(net):
        return False
    if not any(is_hybridized(block) for block in _hybrid_blocks(net)):
        return False
    convert_for_cpu(net)
    return True


def say_what_was_converted(net: mx.gluon.Block) -> None:
    """Say in one line what :func:`convert_by_default` has replaced in `net`, after its first forward pass."""
    replaced = _patterns(net, of_converted=True)
    if replaced:
        patterns = ", ".join(f"{times} x {pattern}" for pattern, times in replaced.items())
        LOG.warning(
            f"gluon_parallel: {type(net).__name__} runs a graph that is faster on CPUs, with the same values and files "
            f"({patterns}); convert_for_cpu=False or GLUON_PARALLEL_CONVERT_FOR_CPU=0 leaves it as it was"
        )


def _patterns(net: mx.gluon.Block, of_converted: bool) -> dict[str, int]:
    """{pattern: how often} in the graphs that converted blocks, or all others, have run so far."""
    found: dict[str, int] = {}
    for block in _hybrid_blocks(net):
        if executor_of(block) is not None and _is_converted(block) == of_converted:
            for pattern, times in _rewritten(traced_graph(block)[1], block)[1].items():
                found[pattern] = found.get(pattern, 0) + times
    return found


def _hybrid_blocks(net: mx.gluon.Block) -> list[mx.gluon.HybridBlock]:
    return [block for block in blocks_of(net) if isinstance(block, mx.gluon.HybridBlock)]


def _is_converted(net: mx.gluon.Block) -> bool:
    return any(map(_converted.of, _hybrid_blocks(net)))


def _rewritten(symbol: mx.sym.Symbol, block: mx.gluon.Block) -> tuple[mx.sym.Symbol, dict[str, int]]:
    parameters = block.collect_params()
    shapes = {name: parameter.shape or () for name, parameter in parameters.items()}
    return rewrite(symbol, shapes, all(one.dtype in (np.float32, "float32") for one in parameters.values()))


def for_cpu(symbol: mx.sym.Symbol, block: mx.gluon.Block | None) -> mx.sym.Symbol:
    """The graph that runs `symbol` faster on CPUs, if `block`, whose graph it is, is converted; else `symbol`."""
    if block is None or not _is_converted(block) or mx.util.is_np_array():
        return symbol
    return _rewritten(symbol, block)[0]


def is_faster_on(x: mx.nd.NDArray) -> bool:
    """Whether the rewritten graph is meant for this input: on a CPU, in single or double precision."""
    return x.context.device_type.startswith("cpu") and x.dtype in (np.float32, np.float64)
