"""Dense layers whose weight is frozen and whose bias is not: oneDNN alone would give the bias no gradient.

On CPUs, the backward pass of MXNet's FullyConnected writes neither gradient where nobody wants that of the weight, and
yet the bias's counts as written: it is that of an earlier pass, or zero. So graphs compute the weight's too, and the
bias's has the same bits as in training without frozen parameters; calls on arrays add the bias by another operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..mxnet.arrays import has_graph
from ..mxnet.compat import mx
from .rewrite_graph import Node, graph_of, new_node, replace_nodes

_OPERATOR = "FullyConnected"
_Parameters = Sequence[mx.gluon.Parameter]


class DenseLayer(NamedTuple):
    """A layer of a graph, and the parameters that its weight and its bias are made of."""

    number: int  # of its node
    weights: _Parameters
    biases: _Parameters

    def is_wrong(self) -> bool:
        """Whether its weight is frozen, and its bias is not; float64 is not computed by oneDNN."""
        are_frozen = [one.grad_req == "null" and np.dtype(one.dtype) != np.float64 for one in self.weights]
        return all(are_frozen) and any(one.grad_req != "null" for one in self.biases)


def dense_layers(symbol: mx.sym.Symbol, block: mx.gluon.Block | None) -> list[DenseLayer]:
    """The layers with a bias of a block's graph, as far as weight and bias are made of nothing but its parameters."""
    if block is None:
        return []
    parameters = dict(block.collect_params().items())  # whose own `get` would make parameters
    return [
        DenseLayer(number, [parameters[name] for name in weights], [parameters[name] for name in biases])
        for number, weights, biases in _sources_of_layers(symbol)
        if parameters.keys() >= {*weights, *biases}
    ]


def _sources_of_layers(symbol: mx.sym.Symbol) -> list[tuple[int, list[str], list[str]]]:
    """(number, names of inputs that its weight, and that its bias is computed from), of each layer with a bias."""
    nodes = graph_of(symbol)["nodes"]
    if not any(map(_has_bias, nodes)):
        return []
    sources: list[dict[str, None]] = []  # of each node
    found = []
    for number, node in enumerate(nodes):
        of_inputs = [sources[source] for source, *_ in node["inputs"]]
        sources.append({name: None for names in of_inputs for name in names})
        if node["op"] == "null":
            sources[-1] = {node["name"]: None}
        elif _has_bias(node):
            found.append((number, [*of_inputs[1]], [*of_inputs[2]]))
    return found


def with_weight_gradients(symbol: mx.sym.Symbol, layers: Sequence[int]) -> mx.sym.Symbol:
    """The graph in which the layers of these numbers compute the gradient of their weight, wanted or not."""
    chosen = {*layers}

    def replacement(number: int, node: Node) -> list[Node]:
        if number not in chosen:
            return [node]
        # A cast to the dtype that they have. Its backward pass takes the gradients of all three at once. It loses what
        # it is to add to another gradient, so copies of data and bias take it: that of the weight is not wanted.
        data, weight, bias = node["inputs"]
        copies = [
            new_node("_copy", f"{node['name']}_{name}") | {"inputs": [source]}
            for name, source in (("bias", bias), ("data", data))
        ]
        cast = new_node("amp_multicast", f"{node['name']}_inputs", num_outputs="3")
        cast["inputs"] = [[-1, 0, 0], weight, [-2, 0, 0]]
        return [*copies, cast, {**node, "inputs": [[-1, output, 0] for output in range(3)]}]

    return replace_nodes(symbol, replacement)


def _has_bias(node: Node) -> bool:
    return node["op"] == _OPERATOR and len(node["inputs"]) == 3


def fully_connected(
    call_in_mxnet: Callable[..., Any], data: Any = None, weight: Any = None, bias: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """MXNet's FullyConnected of arrays, whose bias has the right gradient where the weight has none."""
    if bias is None or not mx.autograd.is_recording() or not _is_frozen(weight) or _is_frozen(bias):
        return call_in_mxnet(data, weight, bias, *args, **kwargs)
    names = "num_hidden", "no_bias", "flatten", "out", "name"
    options = {**dict(zip(names, args)), **kwargs}
    if str(options.get("no_bias")) in ("True", "1"):
        return call_in_mxnet(data, weight, bias, **options)
    out = options.pop("out", None)
    product = call_in_mxnet(data, weight, None, **{**options, "no_bias": True})
    add = mx.np.add if isinstance(product, mx.np.ndarray) else mx.nd.broadcast_add
    return add(product, bias, out=out)


def bind(bind_in_mxnet: Callable[..., Any], symbol: mx.sym.Symbol, *args: Any, **kwargs: Any) -> Any:
    """Bind a symbol, as MXNet's Module does, whose dense layers with a frozen weight compute its gradient too."""
    given = inspect.signature(bind_in_mxnet).bind(symbol, *args, **kwargs)
    wanted, names = given.arguments.get("grad_req", "write"), symbol.list_arguments()
    if isinstance(wanted, str):
        return bind_in_mxnet(symbol, *args, **kwargs)
    requests = wanted if isinstance(wanted, dict) else dict(zip(names, wanted))
    frozen = {name for name in names if requests.get(name, "null") == "null"}
    layers = [
        number
        for number, weights, biases in _sources_of_layers(symbol)
        if frozen.issuperset(weights) and not frozen.issuperset(biases)
    ]
    types = given.arguments.get("type_dict") or {}
    if layers and bind_in_mxnet.__name__ == "simple_bind":  # the types of inputs do not follow through a cast
        types = {**dict(zip(names, symbol.infer_type(**types)[0] or ())), **types}
        given.arguments["type_dict"] = types
    if layers and not any(np.dtype(one) == np.float64 for one in types.values()):  # which oneDNN does not compute
        given.arguments["self"] = with_weight_gradients(symbol, layers)
    return bind_in_mxnet(*given.args, **given.kwargs)


def _is_frozen(array: mx.nd.NDArray) -> bool:
    """Whether an array has no gradient, nor was computed from one that has; MXNet records such inputs as variables."""
    is_recorded = array.grad is not None or has_graph(array)
    return not is_recorded or (array.grad is None and mx.autograd.get_symbol(array).get_children() is None)
