"""Graph rewriting: in what MXNet runs, though not in saved graphs, BatchNorm nodes that are marked synchronise."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from typing import Any

from ...compat import mx
from ...compat.array_types import BFLOAT16
from ..rewrite_graph import Node, graph_of, new_node, replace_nodes
from . import operator, sync_group

Groups = dict[sync_group.SyncGroup, list[str]]  # and the names of the running means of its operators
# The attribute by which a BatchNorm node names its sync group. MXNet carries such attributes along and ignores them.
MARK = "__gluon_parallel_sync__"


def synchronised(symbol: mx.sym.Symbol) -> tuple[mx.sym.Symbol, Groups]:
    """The traced graph with every marked BatchNorm node replaced by the operator that exchanges its statistics.

    Also, for each group that its operators need to find, the names of the running means of the group's operators.
    """
    if MARK not in symbol.tojson():
        return symbol, {}
    nodes = graph_of(symbol)["nodes"]
    halves = _in_bfloat16(symbol, nodes)
    kernels = {len(re.findall(r"\d+", node["attrs"]["kernel"])) for node in nodes if "kernel" in node.get("attrs", {})}
    images = kernels and kernels <= {1, 2}  # at most four axes, as far as one can see
    used: Groups = {}

    def replacement(_number: int, norm: Node) -> list[Node]:
        token, name = norm.get("attrs", {}).get(MARK), norm["name"]
        group = None if token is None or norm["op"] != "BatchNorm" else sync_group.find_or_make(token, name)
        if group is None:
            return [norm]
        data, *parameters = norm["inputs"]
        used.setdefault(group, []).append(nodes[parameters[2][0]]["name"])
        operator.load()  # where no layer has done so, as in an imported net
        custom = new_node("Custom", f"{name}_sync", op_type=operator.NAME, token=group.token)
        custom["attrs"] |= {key: text for key, text in norm["attrs"].items() if key in operator.Settings._fields}
        custom["inputs"] += parameters
        # Convolutions return oneDNN's blocked layout. MXNet reorders it for a custom operator into a buffer that it
        # frees before the operator, which runs on a thread of its own, has read it. So only plain arrays may reach it.
        # Reshape (-2: to the shape that it has) reorders in place, but not arrays with five axes. Squeeze without axes
        # makes a plain copy of any array, in the backward pass too, which Reshape does not.
        plain = {"op": "Reshape", "shape": "(-2,)"} if images else {"op": "squeeze", "axis": "()"}
        chain = [new_node(name=f"{name}_plain", **plain), custom, new_node("squeeze", name, axis="()")]
        if name in halves:  # the operator's arithmetic is in float32
            chain[-1]["name"] = f"{name}_squeezed"
            chain = [new_node("amp_cast", f"{name}_float32", dtype="float32"), *chain]
            chain.append(new_node("amp_cast", name, dtype="bfloat16"))
        chain[0]["inputs"] = [data]
        return chain

    replaced = replace_nodes(symbol, replacement)
    return (replaced if used else symbol), used


def _in_bfloat16(symbol: mx.sym.Symbol, nodes: list[Node]) -> Collection[str]:
    """The names of the nodes that give bfloat16, of a graph that MXNet's automatic mixed precision has traced."""
    if not any(node["op"] == "amp_cast" for node in nodes):
        return frozenset()
    inputs = [node for node in nodes if node["op"] == "null" and "__dtype__" not in node.get("attrs", {})]
    outputs = symbol.get_internals()
    _, dtypes, _ = outputs.infer_type_partial(**{node["name"]: "float32" for node in inputs})
    suffix = "_output"
    return {name[: -len(suffix)] for name, dtype in zip(outputs.list_outputs(), dtypes) if dtype == BFLOAT16}


def sync_batch_norm_symbol(
    data: mx.sym.Symbol,
    gamma: mx.sym.Symbol | None = None,
    beta: mx.sym.Symbol | None = None,
    moving_mean: mx.sym.Symbol | None = None,
    moving_var: mx.sym.Symbol | None = None,
    *,
    num_devices: int | None = None,
    ndev: int | None = None,
    kvstore: Any = None,
    timeout: float | None = None,
    name: str | None = None,
    **batch_norm: Any,
) -> mx.sym.Symbol:
    """``mx.sym.BatchNorm`` whose statistics are those of all devices, once a gluon block runs the graph.

    For code that takes a symbol function, such as GluonCV's feature pyramids (`sym_norm_layer`); everywhere else use
    :class:`SyncBatchNorm`. Devices exchange in graphs that gluon executes (``SymbolBlock``, hybridized blocks); under
    ``Module`` or a bound executor this is a plain BatchNorm.

    Args:
        data: the input symbol.
        gamma, beta, moving_mean, moving_var: variables; made by MXNet if left out.
        num_devices: how many devices of this process take part: those that the block's parameters live on.
        ndev: the same, under the name that ``mx.sym.contrib.SyncBatchNorm`` has for it.
        kvstore: links the processes, as in :class:`SyncBatchNorm`; by default only the devices of this process do. A
            graph that is loaded by another program can be trained there if this was a name, not an object.
        timeout: seconds that a device waits for the others; by default as in :class:`SyncBatchNorm`.
        name: the node's name, from which MXNet derives the parameters' names.
        batch_norm: arguments of ``mx.sym.BatchNorm`` (`eps`, `momentum`, `fix_gamma`, `use_global_stats`, `axis`).

    Returns:
        A symbol.

    Raises:
        ValueError: the number of devices is not said.

    Example:
        >>> y = sync_batch_norm_symbol(mx.sym.var("x"), num_devices=2, name="bn")
        >>> y.list_inputs()
        ['x', 'bn_gamma', 'bn_beta', 'bn_moving_mean', 'bn_moving_var']
    """
    num_devices = num_devices if num_devices is not None else ndev
    if num_devices is None or num_devices < 1:
        raise ValueError(f"sync_batch_norm_symbol: got num_devices={num_devices!r}; expected the number of devices")
    options: dict[str, Any] = {"token": uuid.uuid4().hex, "num_devices": int(num_devices), "timeout": timeout}
    if kvstore is not None:
        options["kvstore"] = kvstore if isinstance(kvstore, str) else sync_group.HANDED_OVER
        sync_group.stores[options["token"]] = kvstore
    attributes = {MARK: json.dumps(options)}
    return mx.sym.BatchNorm(data, gamma, beta, moving_mean, moving_var, name=name, attr=attributes, **batch_norm)
