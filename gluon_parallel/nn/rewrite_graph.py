"""Traced graphs of blocks: nodes are replaced by chains of nodes."""

from __future__ import annotations

import json
from typing import Any, Callable

from ..mxnet.blocks import NumPySymbol
from ..mxnet.compat import mx

Node = dict[str, Any]  # in MXNet's JSON form
_CONSTANTS = {"True": True, "False": False, "None": None}
_BRACKETS = str.maketrans("()", "[]")


def graph_of(symbol: mx.sym.Symbol) -> dict[str, Any]:
    """A graph in MXNet's JSON form: "nodes" with "op", "name", "attrs", and "inputs" as [node, output, version]."""
    return json.loads(symbol.tojson(remove_amp_cast=False))


def attribute_value(text: str) -> Any:
    """The Python value of an attribute, which MXNet keeps as a string; a string that is no other value stays one.

    Without ``ast.literal_eval``: when several threads use it, it fails now and then in Python 3.11 (SystemError: AST
    constructor recursion depth mismatch).

    Example:
        >>> [attribute_value(text) for text in ("(3, 3)", "(2,)", "1e-05", "True", "None", "NCHW")]
        [[3, 3], [2], 1e-05, True, None, 'NCHW']
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        return json.loads(text.translate(_BRACKETS).replace(",]", "]"))
    except ValueError:
        return text


def new_node(op: str, name: str, **attributes: str) -> Node:
    """A node whose input is the node before it in a chain; others are to be given to the first one."""
    return {"op": op, "name": name, "attrs": attributes, "inputs": [None]}


def replace_nodes(symbol: mx.sym.Symbol, replacement: Callable[[int, Node], list[Node]]) -> mx.sym.Symbol:
    """Replace nodes of a traced graph; inputs and outputs stay, in the same order.

    `replacement` is a function of (number, node) that returns the nodes to put in its place, ``[node]`` for most. Their
    inputs are numbered as in `symbol`; those of nodes in the list from the end, so -1 is the node before, and None its
    first output.
    """
    graph = graph_of(symbol)
    nodes: list[Node] = []
    renumbered: dict[int, int] = {}
    for number, old in enumerate(graph["nodes"]):
        for new in replacement(number, old):
            inputs = [[-1, 0, 0] if one is None else one for one in new.get("inputs", [])]
            placed = [[len(nodes) + source if source < 0 else renumbered[source], *which] for source, *which in inputs]
            nodes.append({**new, "inputs": placed})
        renumbered[number] = len(nodes) - 1
    graph["nodes"] = nodes
    graph["arg_nodes"] = [number for number, new in enumerate(nodes) if new["op"] == "null"]
    graph["heads"] = [[renumbered[source], *which] for source, *which in graph["heads"]]
    graph.pop("node_row_ptr", None)
    replaced = mx.sym.load_json(json.dumps(graph))
    if isinstance(symbol, NumPySymbol):
        replaced = replaced.as_np_ndarray()  # whose outputs are mx.np arrays
    assert replaced.list_inputs() == symbol.list_inputs()  # MXNet hands the inputs over by position
    return replaced
