"""Rewrite a traced graph into one with the same values and gradients that MXNet 1.9.1 runs faster on CPUs.

Four patterns are replaced; everything else in the graph stays as it is.

ReLU6 behind a batch norm: `clip` branches on every number, and the processor predicts these branches badly for numbers
of both signs. `maximum`, which has no branches, takes the negative ones out first. (`relu` would too, but its gradient
at 0 is 0, and that of `clip` is 1.) In MobileNetV2 `clip` and its gradient took 60 % of the operators' time.

Batch norm between convolutions of different layouts: oneDNN stores channels in blocks of 16, 8 or 4, whichever a
convolution prefers. Where the data and the gradient of a batch norm have different blocks, oneDNN falls back to its
reference code, which takes some hundred times as long. Such a batch norm gets its input as (1, N, C, H, W): an array
that changes its number of axes is always converted to the plain layout.

Global average pooling: the gradient of 1 x 1 pixels can count as another layout too, with the same effect on the batch
norm before it. Means over one axis after the other are always plain.

Pooling of channels that fill no blocks: where the channels of a convolution are no multiple of 8, MXNet lets oneDNN
compute in the plain layout, in which max pooling and, without AVX-512, average pooling are slow, and convolutions copy
their input first. Such convolutions get zeros behind their weights, for more channels, which are cut off where another
operator reads them. In float64, for which there is no oneDNN, zeros would only be more to compute.
"""

from __future__ import annotations

from typing import Any, Callable

from ..mxnet.compat import mx
from .rewrite_graph import Node, attribute_value, graph_of, new_node, replace_nodes
from .sync_batch_norm.graph import MARK

# Operators through which a blocked layout passes unchanged, forward and backward.
_KEEP_LAYOUT = {"Activation", "Concat", "Dropout", "LeakyReLU", "Pooling", "_copy", "add_n", "elemwise_add"}

_BLOCK = 8  # channels per block, the fewest with fast convolutions and pooling


def rewrite(
    symbol: mx.sym.Symbol, shapes: dict[str, tuple[int, ...]], single: bool = True
) -> tuple[mx.sym.Symbol, dict[str, int]]:
    """The graph without the patterns that are slow on CPUs, and how often each was replaced.

    `shapes` are those of convolutions' weights by name; `single`: whether these are in single precision.

    Example:
        >>> norm = mx.sym.BatchNorm(mx.sym.var("x"), name="norm")
        >>> rewrite(mx.sym.clip(norm, 0, 6), {})[1]
        {'ReLU6 behind a batch norm': 1}
    """
    graph = _Graph(symbol, shapes)
    filled = _fill_blocks(graph) if single else {}
    poolings = sum(graph.op(number) == "Pooling" for number in filled)
    replaced = {"pooling of channels that fill no blocks": poolings} if poolings else {}

    def replacement(number: int, old: Node) -> list[Node]:
        if number in filled:
            return filled[number]
        for name, fits, chain in _PATTERNS:
            if fits(graph, number):
                replaced[name] = replaced.get(name, 0) + 1
                return chain(old)
        return [old]

    changed = replace_nodes(symbol, replacement)
    return (changed if replaced else symbol), replaced


class _Graph:
    """The nodes of a graph in MXNet's JSON form, and which nodes read their outputs."""

    def __init__(self, symbol: mx.sym.Symbol, shapes: dict[str, tuple[int, ...]]) -> None:
        graph = graph_of(symbol)
        self.nodes = graph["nodes"]
        self._shapes = dict(shapes)
        self._readers: list[list[int]] = [[] for _ in self.nodes]
        self.outputs_read: list[set[int]] = [set() for _ in self.nodes]
        for number, node in enumerate(self.nodes):
            for source, output, *_ in node.get("inputs", []):
                self._readers[source].append(number)
                self.outputs_read[source].add(output)
        self._heads = {source for source, *_ in graph["heads"]}
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

    def weight_shape(self, convolution: int) -> tuple[int, ...]:
        """(outputs, inputs of each group, height, width) of the kernels; () if not known, or not of images."""
        weight = self._shapes.get(self.nodes[self.sources(convolution)[1]]["name"], ())
        return () if len(weight) != 4 or 0 in weight else weight

    def widened(self, convolution: int, outputs: int, inputs: int) -> Node:
        """Count so many more outputs and inputs to the convolution, and return its node with them."""
        node, shape = self.nodes[convolution], self.weight_shape(convolution)
        weight = self.nodes[self.sources(convolution)[1]]["name"]
        self._shapes[weight] = (shape[0] + outputs, shape[1] + inputs, *shape[2:])
        return {**node, "attrs": {**node["attrs"], "num_filter": str(shape[0] + outputs)}}

    def can_widen(self, number: int) -> bool:
        """Whether it is a convolution that can have more channels, fewer than it has, on both sides."""
        if self.op(number) != "Convolution" or not self._is_of_images(number):
            return False
        weight, own = self.weight_shape(number), self.sources(number)[1:]
        private = all(
            self.op(one) == "null" and one not in self._heads and self._readers[one] == [number] for one in own
        )
        return (
            private and weight != () and -weight[0] % _BLOCK < weight[0] and self.attribute(number, "num_group", 1) == 1
        )

    def keeps_channels_apart(self, number: int) -> bool:
        """Whether it is an activation or oneDNN's pooling, so that more channels change nothing in the others."""
        return self.op(number) == "Activation" or (
            self.op(number) == "Pooling"
            and self._is_of_images(number)
            and self.attribute(number, "pool_type", "max") in ("avg", "max")
            and self.attribute(number, "pooling_convention", "valid") == "valid"
            and not self.attribute(number, "global_pool", False)
        )

    def _is_of_images(self, number: int) -> bool:
        return len(self.attribute(number, "kernel", ())) == 2 and self.attribute(number, "layout") in ("NCHW", None)

    def can_hand_on(self, number: int) -> bool:
        """Whether everything that reads this node's output can take more channels."""
        return number not in self._heads and all(
            self.keeps_channels_apart(reader) or self.can_widen(reader) for reader in self._readers[number]
        )

    def reaches_pooling(self, number: int) -> bool:
        """Whether more channels of this node's output can be handed on to pooling."""
        apart = [reader for reader in self._readers[number] if self.keeps_channels_apart(reader)]
        return self.can_hand_on(number) and any(
            self.op(reader) == "Pooling" or self.reaches_pooling(reader) for reader in apart
        )

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
        """Channels per block that oneDNN stores its images in, with AVX-512; None if not in blocks, or not known."""
        weight, groups = self.weight_shape(convolution), self.attribute(convolution, "num_group", 1)
        if not weight:
            return None
        outputs, inputs = weight[0] // groups, weight[1]  # of each group
        if outputs == inputs == 1:  # depthwise
            outputs = inputs = groups
        elif inputs < _BLOCK:  # the net's images, which are not in blocks
            inputs = outputs
        blocks = (16, 8, 4) if 1 < groups < outputs * groups else (16, 8)
        return next((block for block in blocks if outputs % block == inputs % block == 0), None)


def _is_relu6(graph: _Graph, number: int) -> bool:
    return graph.op(number) == "clip" and graph.op(graph.sources(number)[0]) == "BatchNorm"


def _clip_above(node: Node) -> list[Node]:
    name, low = node["name"], node["attrs"]["a_min"]
    # The reshape converts to the plain layout once, for the forward and for the backward pass.
    plain = {**new_node("Reshape", f"{name}_plain", shape="(-2,)"), "inputs": node["inputs"]}
    return [plain, new_node("_maximum_scalar", f"{name}_low", scalar=low), {**node, "inputs": [None]}]


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
    norm["inputs"] = [None, *node["inputs"][1:]]
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


def _fill_blocks(graph: _Graph) -> dict[int, list[Node]]:
    """Replacements by number: more channels for convolutions with pooling before or behind, and for what is between."""
    more: dict[int, tuple[int, int]] = {}  # channels of the graph, and those that a node's readers get behind them
    replacements: dict[int, list[Node]] = {}
    for number, node in enumerate(graph.nodes):
        source = next(iter(graph.sources(number)), -1)
        channels, added = more.get(source, (0, 0))
        if source in more and graph.keeps_channels_apart(number):
            replacements[number] = [node]
        elif graph.can_widen(number) and (source in more or graph.reaches_pooling(number)):
            before = added
            channels, inputs, *_ = graph.weight_shape(number)
            fast = inputs < _BLOCK or (inputs + before) % _BLOCK == 0  # the net's images need no blocks
            added = -channels % _BLOCK if fast else 0
            if before or added:
                weight, *bias = graph.sources(number)[1:]
                replacements[weight] = _with_zeros(graph.nodes[weight], (0, added), (0, before), (0, 0), (0, 0))
                replacements.update({one: _with_zeros(graph.nodes[one], 0, added) for one in bias})
                replacements[number] = [graph.widened(number, added, before)]
        if added and graph.can_hand_on(number):
            more[number] = channels, added
        elif added:
            (wide,) = replacements[number]
            cut = new_node("slice_axis", node["name"], axis="1", begin="0", end=str(channels))
            replacements[number] = [{**wide, "name": f"{node['name']}_filled"}, cut]
    return replacements


def _with_zeros(node: Node, *width: Any) -> list[Node]:
    """`node`, and zeros around it: (before, behind) for each axis, or before, behind where there is one axis."""
    return [node, new_node("_npi_pad", f"{node['name']}_filled", mode="constant", pad_width=str(width))]


_PATTERNS = (
    ("ReLU6 behind a batch norm", _is_relu6, _clip_above),
    ("batch norm between two layouts", _is_between_layouts, _normalise_plain),
    ("global average pooling", _is_global_average, _mean_of_means),
)
