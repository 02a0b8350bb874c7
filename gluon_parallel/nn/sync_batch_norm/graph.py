"""Hybridized graphs keep the plain BatchNorm operator; what MXNet runs meets the other devices at the marked ones."""

from __future__ import annotations

import json

from ...compat import mx
from ...compat.array_types import BFLOAT16
from ...device_threads import launch_by_device
from . import operator, sync_group

# A node with this attribute is synchronised. MXNet carries attributes with such names along and ignores them.
MARK = "__gluon_parallel_sync__"


def mark(group):
    """The attributes by which a BatchNorm node names its sync group."""
    return {MARK: group.token}


def _operator_node(node, token):
    attributes = node["attrs"]
    settings = {
        "op_type": operator.NAME,
        "token": token,
        "axis": attributes.get("axis", "1"),
        "epsilon": attributes.get("eps", "0.001"),
        "momentum": attributes.get("momentum", "0.9"),
        "fix_gamma": attributes.get("fix_gamma", "True"),
        "use_global_stats": attributes.get("use_global_stats", "False"),
    }
    return {"op": "Custom", "name": f"{node['name']}_sync", "attrs": settings}


# Convolutions return oneDNN's blocked layout. MXNet reorders it for a custom operator into a buffer that it frees
# before the operator, which runs on a thread of its own, has read it. So only plain arrays may reach it: on the way in
# Reshape (-2: to the shape that it has) reorders in place, and the gradient of squeeze hands the plain layout to the
# backward pass, which the gradient of Reshape does not.
def plain_before(F, x):
    """`x` in the plain layout, in the forward pass."""
    return F.reshape(x, shape=(-2,))


def plain_after(F, y):
    """`y` (1, ...) without its first axis, so that its gradient arrives in the plain layout."""
    return F.squeeze(y, axis=0)


def _node(op, name, source, **attributes):
    return {"op": op, "name": name, "attrs": attributes, "inputs": [source]}


def synchronised(symbol):
    """`symbol` with every marked BatchNorm node replaced by the operator that meets the other devices.

    Args:
        symbol: the graph that a net was traced to.

    Returns:
        (symbol, groups): the graph to run; and for each group that its operators need to find, which of the graph's
        inputs is its gamma, and how many of the operators are its.
    """
    graph = json.loads(symbol.tojson(remove_amp_cast=False))
    halves = _in_bfloat16(symbol, graph)
    nodes: list[dict] = []
    renumbered: dict[int, int] = {}
    used: dict[sync_group.SyncGroup, list[str]] = {}
    for number, node in enumerate(graph["nodes"]):
        node["inputs"] = [[renumbered[source], *rest] for source, *rest in node.get("inputs", [])]
        token = node.get("attrs", {}).get(MARK)
        group = None if token is None or node["op"] != "BatchNorm" else sync_group.find_or_make(token, node["name"])
        if group is not None:
            data, *parameters = node["inputs"]
            used.setdefault(group, []).append(nodes[parameters[0][0]]["name"])
            name = node["name"]
            if name in halves:  # the operator's arithmetic is in float32
                nodes.append(_node("amp_cast", f"{name}_float32", data, dtype="float32"))
                data = [len(nodes) - 1, 0, 0]
            nodes.append(_node("Reshape", f"{name}_plain", data, shape="(-2,)"))
            nodes.append({**_operator_node(node, group.token), "inputs": [[len(nodes) - 1, 0, 0], *parameters]})
            node = _node("squeeze", name, [len(nodes) - 1, 0, 0], axis="(0,)")
            if name in halves:
                nodes.append({**node, "name": f"{name}_squeezed"})
                node = _node("amp_cast", name, [len(nodes) - 1, 0, 0], dtype="bfloat16")
        renumbered[number] = len(nodes)
        nodes.append(node)
    if not used:
        return symbol, {}
    graph["nodes"] = nodes
    graph["arg_nodes"] = [number for number, node in enumerate(nodes) if node["op"] == "null"]
    graph["heads"] = [[renumbered[source], *rest] for source, *rest in graph["heads"]]
    graph.pop("node_row_ptr", None)
    replaced = mx.sym.load_json(json.dumps(graph))
    if isinstance(symbol, mx.sym.np._Symbol):
        replaced = replaced.as_np_ndarray()  # whose outputs are mx.np arrays
    assert replaced.list_inputs() == symbol.list_inputs()  # MXNet hands the inputs over by position
    inputs = replaced.list_inputs()
    return replaced, {group: (inputs.index(gammas[0]), len(gammas)) for group, gammas in used.items()}


def _in_bfloat16(symbol, graph):
    """The names of the nodes that give bfloat16, of a graph that MXNet's automatic mixed precision has traced."""
    if not any(node["op"] == "amp_cast" for node in graph["nodes"]):
        return frozenset()
    inputs = [node for node in graph["nodes"] if node["op"] == "null" and "__dtype__" not in node.get("attrs", {})]
    outputs = symbol.get_internals()
    _, dtypes, _ = outputs.infer_type_partial(**{node["name"]: "float32" for node in inputs})
    suffix = "_output"
    return {name[: -len(suffix)] for name, dtype in zip(outputs.list_outputs(), dtypes) if dtype == BFLOAT16}


class _CachedOp(mx.nd.CachedOp):
    """MXNet's executor of hybridized graphs, which checks in with the groups of the graph before every training call.

    The check is made here because here is the last Python code that runs before the call is in the engine's hands.

    `static_shape` is left out (`static_alloc` stays): with it MXNet does not tell its engine that the operator changes
    the running statistics, so whatever else touches them at that time, such as the trainer's first step, which copies
    all parameters, may undo an update.
    """

    def __init__(self, sym, flags=(), *args, **kwargs):
        running, self.groups = synchronised(sym) if MARK in sym.tojson() else (sym, {})
        if self.groups:
            flags = [(name, value) for name, value in flags if name != "static_shape"]
        super().__init__(running, flags, *args, **kwargs)

    def __call__(self, *args, **kwargs):
        if self.groups:
            launch_by_device()
            if mx.autograd.is_training():
                for group, (gamma, times) in self.groups.items():
                    group.enter(args[gamma].ctx, args[gamma].shape[0], times)
        return super().__call__(*args, **kwargs)


# Gluon's blocks look the class up in mxnet.ndarray each time they build a graph.
mx.nd.CachedOp = _CachedOp
