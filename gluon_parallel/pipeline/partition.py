"""Cut of one Sequential into stages that take equally long, or hold equally many bytes of parameters."""

from __future__ import annotations

import itertools
import numbers
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..errors import PipelineMismatch
from ..mxnet.blocks import children_of, flags_of, is_hybridized
from ..mxnet.compat import mx
from ..mxnet.parameters import has_values, waits_for_shape
from ..step.precision import refuse_16_bits_on_cpus
from .profile import parameter_bytes
from .stage import Arrays, outputs_of

_CHAINS = (mx.gluon.nn.Sequential, mx.gluon.nn.HybridSequential)
_NUM_MEASURED = 3  # forward and backward passes of each layer, after one that does not count


class Layer(NamedTuple):
    """Costs of a layer."""

    name: str
    num_bytes: int  # of its parameters
    seconds: float  # of a forward and a backward pass; 0 where nothing was measured


class Partition(list):
    """The stages of a net: a list of blocks, and what they cost; its text is a table.

    Attributes:
        layers: for each stage, a list of the :class:`Layer` in it.
        net: that was cut.
    """

    def __init__(self, stages: Iterable[mx.gluon.Block], layers: list[list[Layer]], net: mx.gluon.Block) -> None:
        super().__init__(stages)
        self.layers, self.net = layers, net

    def __str__(self) -> str:
        seconds = [sum(layer.seconds for layer in layers) for layers in self.layers]
        num_bytes = [sum(layer.num_bytes for layer in layers) for layers in self.layers]
        lines = ["stage  layers  parameters, MB  share of time"]
        for number, layers in enumerate(self.layers):
            share = f"{seconds[number] / sum(seconds):.0%}" if sum(seconds) else "not measured"
            names = layers[0].name if len(layers) == 1 else f"{layers[0].name} to {layers[-1].name}"
            lines.append(f"{number:5}  {len(layers):6}  {num_bytes[number] / 1e6:14.3f}  {share:>13}  {names}")
        return "\n".join(lines)


def partition(net: mx.gluon.Block, num_stages: int, *batch: mx.nd.NDArray) -> Partition:
    """Cut a Sequential into consecutive stages, so that the most expensive one is as cheap as possible.

    The cut is between layers: the children of the Sequential, and of Sequentials within it. The stages consist of the
    net's own layers, so parameters are those of the net, and ``net.save_parameters`` saves them.

    Args:
        net: an initialised ``gluon.nn.Sequential`` or ``HybridSequential``.
        num_stages: how many.
        batch: inputs of the net, of as many samples as a micro-batch has. Then each layer's forward and backward pass
            is measured, on the device of the net's parameters, and stages shall take equally long. Without it they
            shall hold equally many bytes of parameters.

    Returns:
        The :class:`Partition`, a list of blocks that :class:`gluon_parallel.Pipeline` takes. Printing it shows the cut.

    Raises:
        PipelineMismatch: the net is no Sequential, has fewer layers than stages, or unknown shapes; or a layer cannot
            take its part of `batch`.
        PrecisionUnsupported: to be measured in float16 on a CPU.

    Example:
        >>> net = mx.gluon.nn.HybridSequential()
        >>> net.add(*(mx.gluon.nn.Dense(units, in_units=8) for units in (8, 8, 4)))
        >>> net.initialize()
        >>> [len(stage) for stage in partition(net, 2)]
        [1, 2]
    """
    if type(net) not in _CHAINS:
        raise PipelineMismatch(
            f"a {type(net).__name__} cannot be cut: expected a gluon.nn.Sequential or HybridSequential. Cut other nets "
            "by hand: a list of blocks, of which each is called with what the one before it returns"
        )
    for array in batch:
        if not isinstance(array, mx.nd.NDArray) or not array.size:
            raise PipelineMismatch(
                f"batch: got {'an empty' if isinstance(array, mx.nd.NDArray) else 'a'} {type(array).__name__}; "
                "expected the net's inputs, NDArrays with samples, one after the other: partition(net, num_stages, x)"
            )
        refuse_16_bits_on_cpus(net, [array.ctx])
    blocks = list(_layers(net))
    if not isinstance(num_stages, numbers.Integral) or not 0 < int(num_stages) <= len(blocks):
        raise PipelineMismatch(
            f"num_stages={num_stages!r}: expected a whole number of at least 1 and at most {len(blocks)}, the "
            "number of the net's layers"
        )
    for parameter in net.collect_params().values():
        if not has_values(parameter) and not (batch and waits_for_shape(parameter)):
            raise PipelineMismatch(
                f"parameter {parameter.name} has no values yet: call net.initialize(...) before the net is cut, and "
                "state every layer's in_units or in_channels, or run one batch, or pass one to gp.pipeline.partition"
            )
    seconds = _measured(blocks, batch) if batch else [0.0] * len(blocks)
    layers = [Layer(block.name, parameter_bytes(block), spent) for block, spent in zip(blocks, seconds)]
    ends = balanced([layer.seconds if batch else layer.num_bytes for layer in layers], num_stages)
    spans = list(zip([0, *ends], ends))
    stages = [_chain(net, number, blocks[begin:end]) for number, (begin, end) in enumerate(spans)]
    return Partition(stages, [layers[begin:end] for begin, end in spans], net)


def balanced(costs: Sequence[float], num_parts: int) -> list[int]:
    """Where each of `num_parts` consecutive, non-empty parts of `costs` ends, so that the largest sum is smallest.

    Example:
        >>> balanced([1, 1, 1, 3], 2), balanced([5, 1, 1, 1], 3)
        ([3, 4], [1, 2, 4])
    """
    sums = [0, *itertools.accumulate(costs)]
    # best[end]: (largest sum, ends) of the first `end` costs in as many parts as there were rounds
    best = {end: (sums[end], [end]) for end in range(1, len(costs) + 1)}
    for part in range(1, num_parts):
        best = {
            end: min(
                (max(best[begin][0], sums[end] - sums[begin]), [*best[begin][1], end]) for begin in range(part, end)
            )
            for end in range(part + 1, len(costs) + 1)
        }
    return best[len(costs)][1]


def _layers(net: mx.gluon.Block) -> Iterator[mx.gluon.Block]:
    for child in children_of(net):
        if type(child) in _CHAINS and len(child):
            yield from _layers(child)
        else:
            yield child


def _chain(net: mx.gluon.Block, number: int, blocks: Sequence[mx.gluon.Block]) -> mx.gluon.Block:
    """A Sequential of some of the net's layers, hybridized as the net is."""
    stage = type(net)(prefix=f"{net.prefix}stage{number}_")
    stage.add(*blocks)
    if is_hybridized(net):
        stage.hybridize(**dict(flags_of(net)))
    return stage


def _measured(blocks: Sequence[mx.gluon.Block], batch: Arrays) -> list[float]:
    """Seconds of a forward and a backward pass of each layer; waits."""
    inputs, found = tuple(batch), []
    for number in range(len(blocks)):
        taken = []
        for _ in range(1 + _NUM_MEASURED):
            arrays = tuple(array.copy() for array in inputs)
            for array in arrays:
                array.attach_grad()
            mx.nd.waitall()
            began = time.perf_counter()
            with mx.autograd.record():
                outputs = outputs_of(blocks, number, arrays, "layer")
            mx.autograd.backward(list(outputs))
            mx.nd.waitall()
            taken.append(time.perf_counter() - began)
        found.append(min(taken[1:]))
        inputs = tuple(output.detach() for output in outputs)
    return found
