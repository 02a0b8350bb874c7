"""Rewrite a traced graph into one with the same values and gradients that MXNet 1.9.1 runs faster on CPUs.

Three patterns are replaced; everything else in the graph stays as it is.

ReLU6 behind a batch norm: `clip` branches on every number, and the processor predicts these branches badly for numbers
of both signs. `maximum`, which has no branches, takes the negative ones out first. (`relu` would too, but its gradient
at 0 is 0, and that of `clip` is 1.) In MobileNetV2 `clip` and its gradient took 60 % of the operators' time.

Batch norm between convolutions of different layouts: oneDNN stores channels in blocks of 16, 8 or 4, whichever a
convolution prefers. Where the data and the gradient of a batch norm have different blocks, oneDNN falls back to its
reference code, which takes some hundred times as long. Such a batch norm gets its input as (1, N, C, H, W): an array
that changes its number of axes is always converted to the plain layout.

Global average pooling: the gradient of 1 x 1 pixels can count as another layout too, with the same effect on the batch
norm before it. Means over one axis after the other are always plain.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

from ..compat import mx
from .rewrite_graph import Node, attribute_value, graph_of, new_node, replace_nodes
from .sync_batch_norm.graph import MARK

# Operators through which a blocked layout passes unchanged, forward and backward.
_KEEP_LAYOUT = {"Activation", "Concat", "Dropout", "LeakyReLU", "Pooling", "_copy", "add_n", "elemwise_add"}


class Rewritten(NamedTuple):
    """The graph to run, and how often each pattern was replaced (only those that occur)."""

    symbol: mx.sym.Symbol
    replaced: dict[str, int]


def rewrite(symbol: mx.sym.Symbol, shapes: dict[str, tuple[int, ...]]) -> Rewritten:
    """Replace the patterns that are slow on CPUs; inputs and outputs stay, in the same order.

    `shapes` are those of the inputs by name; those of convolutions' weights are looked up, others may be missing.

    Example:
        >>> norm = mx.sym.BatchNorm(mx.sym.var("x"), name="norm")
        >>> rewrite(mx.sym.clip(norm, 0, 6), {}).replaced
        {'ReLU6 behind a batch norm': 1}
        >>> rewrite(norm, {}).replaced
        {}
    """
    graph = _Graph(symbol, shapes)
    replaced: dict[str, int] = {}

    def replacement(number: int, old: Node) -> list[Node]:
        for name, fits, chain in _PATTERNS:
            if fits(graph, number):
                replaced[name] = replaced.get(name, 0) + 1
                return chain(old)
        return [old]

    changed = replace_nodes(symbol, replacement)
    return Rewritten(changed if replaced else symbol, replaced)


class _Graph:
    """The nodes of a graph in MXNet's JSON form, and who reads whose output."""

    def __init__(self, symbol: mx.sym.Symbol, shapes: dict[str, tuple[int, ...]]) -> None:
        graph = graph_of(symbol)
        self.nodes = graph["nodes"]
        self._shapes = shapes
        self._readers: list[list[int]] = [[] for _ in self.nodes]
        self.outputs_read: list[set[int]] = [set() for _ in self.nodes]
        for number, node in enumerate(self.nodes):
            for source, output, *_ in node.get("inputs", []):
                self._readers[source].append(number)
                self.outputs_read[source].add(output)
        for source, output, *_ in graph["heads"]:
            self.outputs_read[source].add(output)

    def op(self, number: int) -> str:
        """Name of the operator; "null" for an input of the graph."""
        return self.nodes[number]["op"]

    def sources(self, number: int) -> list[int]:
        """Nodes whose outputs this one reads."""
        return [source for source, *_ in self.nodes[number].get("inputs", [])]

    def attribute(self, number: int, name: str, default: Any = None) -> Any:
        """An attribute of the node as a Python value."""
        text = self.nodes[number].get("attrs", {}).get(name)
        return default if text is None else attribute_value(text)

    def blocks_around(self, number: int) -> set[int]:
        """Channels per block of all convolutions that this node's data comes from or goes to."""
        before = self._convolutions(self.sources(number)[:1], self.sources)
        after = self._convolutions(self._readers[number], self._readers.__getitem__)
        return {block for block in map(self._block, before | after) if block is not None}

    def _convolutions(self, pending: list[int], step: Callable[[int], list[int]]) -> set[int]:
        found: set[int] = set()
        seen: set[int] = set()
        while pending:
            number, *pending = pending
            if self.op(number) == "Convolution":
                found.add(number)
            elif self.op(number) in _KEEP_LAYOUT and number not in seen:
                pending += step(number)
            seen.add(number)
        return found

    def _block(self, convolution: int) -> int | None:
        """Channels per block that oneDNN stores this convolution's images in; None if not in blocks, or not known.

        Observed with AVX-512. With AVX2, blocks of 16 are two of 8; then some batch norms are replaced without need.
        """
        weight = self._shapes.get(self.nodes[self.sources(convolution)[1]]["name"], ())
        groups = self.attribute(convolution, "num_group", 1)
        if len(weight) != 4 or 0 in weight:
            return None
        outputs, inputs = weight[0] // groups, weight[1]  # of each group
        if outputs == inputs == 1:  # depthwise
            outputs = inputs = groups
        elif inputs <= 3:  # the net's images, which are not in blocks
            inputs = outputs
        blocks = (16, 8, 4) if 1 < groups < outputs * groups else (16, 8)
        return next((block for block in blocks if outputs % block == inputs % block == 0), None)


def _is_relu6(graph: _Graph, number: int) -> bool:
    return graph.op(number) == "clip" and graph.op(graph.sources(number)[0]) == "BatchNorm"


def _clip_above(node: Node) -> list[Node]:
    name, low = node["name"], node["attrs"]["a_min"]
    # The reshape converts to the plain layout once, for the forward and for the backward pass.
    plain = {**new_node("Reshape", f"{name}_plain", shape="(-2,)"), "inputs": node["inputs"]}
    return [plain, new_node("_maximum_scalar", f"{name}_low", scalar=low), node]


def _is_between_layouts(graph: _Graph, number: int) -> bool:
    """Whether it is a batch norm of images whose data and gradient may come in different blocks of channels."""
    if graph.op(number) != "BatchNorm" or graph.attribute(number, MARK) is not None:
        return False  # a synchronised one has the plain layout anyway
    blocks = graph.blocks_around(number)
    return (
        graph.attribute(number, "axis", 1) == 1
        and graph.outputs_read[number] <= {0}
        and (len(blocks) > 1 or 4 in blocks)  # there is no fast code for blocks of 4 either
    )


def _normalise_plain(node: Node) -> list[Node]:
    name = node["name"]
    shaped = {**new_node("Reshape", f"{name}_plain", shape="(-4, 1, -1, -2)"), "inputs": node["inputs"][:1]}
    norm = {**node, "name": f"{name}_norm", "attrs": {**node.get("attrs", {}), "axis": "2"}}
    return [shaped, norm, new_node("squeeze", name, axis="(0,)")]


def _is_global_average(graph: _Graph, number: int) -> bool:
    """Whether it is the pooling over all pixels of images (N, C, H, W)."""
    if graph.op(number) != "Pooling" or not graph.attribute(number, "global_pool", False):
        return False
    images = len(graph.attribute(number, "kernel", ())) == 2 and graph.attribute(number, "layout", "NCHW") == "NCHW"
    return images and graph.attribute(number, "pool_type", "max") == "avg"


def _mean_of_means(node: Node) -> list[Node]:
    rows = {**new_node("mean", f"{node['name']}_rows", axis="3", keepdims="True"), "inputs": node["inputs"]}
    return [rows, new_node("mean", node["name"], axis="2", keepdims="True")]


_PATTERNS = (
    ("ReLU6 behind a batch norm", _is_relu6, _clip_above),
    ("batch norm between two layouts", _is_between_layouts, _normalise_plain),
    ("global average pooling", _is_global_average, _mean_of_means),
)
