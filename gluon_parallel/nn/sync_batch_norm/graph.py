"""Graph rewriting: in what MXNet runs, though not in saved graphs, BatchNorm nodes that are marked synchronise."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from typing import Any

from ...mxnet.blocks import traced_graph
from ...mxnet.compat import mx
from ...mxnet.compat.array_types import BFLOAT16
from ..rewrite_graph import Node, graph_of, new_node, replace_nodes
from . import operator, sync_group

# The attribute of BatchNorm nodes that synchronise. MXNet carries such attributes along and ignores them.
MARK = "__gluon_parallel_sync__"
OF_LAYER = "layer"  # its value where a layer has made the node; elsewhere JSON, which describes the sync group


def synchronised(
    symbol: mx.sym.Symbol, block: mx.gluon.Block | None
) -> tuple[mx.sym.Symbol, dict[sync_group.SyncGroup, int]]:
    """The traced graph with the operator that exchanges statistics in the place of every marked BatchNorm node.

    Also the sync groups in it, with the number of operators of each.
    """
    if MARK not in symbol.tojson():
        return symbol, {}
    parameters = _parameters(block)
    nodes = graph_of(symbol)["nodes"]
    halves = _in_bfloat16(symbol, nodes)
    kernels = {len(re.findall(r"\d+", node["attrs"]["kernel"])) for node in nodes if "kernel" in node.get("attrs", {})}
    images = kernels and kernels <= {1, 2}  # at most four axes, as far as one can see
    used: dict[sync_group.SyncGroup, int] = {}

    def replacement(_number: int, norm: Node) -> list[Node]:
        mark, name = norm.get("attrs", {}).get(MARK), norm["name"]
        if mark is None or norm["op"] != "BatchNorm":
            return [norm]
        data, *others = norm["inputs"]
        group = sync_group.group_of(parameters.get(_running_mean(norm, nodes)), mark, name)
        if group is None:
            return [norm]
        used[group] = used.get(group, 0) + 1
        operator.load()  # where no layer has done so, as in an imported net
        custom = new_node("Custom", f"{name}_sync", op_type=operator.NAME, token=group.token)
        custom["attrs"] |= {key: text for key, text in norm["attrs"].items() if key in operator.Settings._fields}
        custom["inputs"] += others
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


def plain_batch_norms(block: mx.gluon.SymbolBlock) -> list[str]:
    """Names of the BatchNorm nodes in its graph that take the statistics of one device's shard while training."""
    nodes, parameters = graph_of(traced_graph(block)[1])["nodes"], _parameters(block)
    return [
        norm["name"] for norm in nodes
        if norm["op"] == "BatchNorm" and norm["attrs"].get("use_global_stats") != "True"
        and norm["attrs"].get(MARK, OF_LAYER) == OF_LAYER
        and sync_group.GROUPS.of(parameters.get(_running_mean(norm, nodes))) is None
    ]  # fmt: skip


def _parameters(block: mx.gluon.Block | None) -> dict[str, mx.gluon.Parameter]:
    return {} if block is None else dict(block.collect_params().items())  # whose own `get` adds a prefix


def _running_mean(norm: Node, nodes: list[Node]) -> str:
    return nodes[norm["inputs"][3][0]]["name"]


def _in_bfloat16(symbol: mx.sym.Symbol, nodes: list[Node]) -> Collection[str]:
    """The names of the nodes that give bfloat16, of a graph that MXNet's automatic mixed precision has traced."""
    if not any(node["op"] == "amp_cast" for node in nodes):
        return frozenset()
    inputs = [node for node in nodes if node["op"] == "null" and "__dtype__" not in node.get("attrs", {})]
    outputs = symbol.get_internals()
    _, dtypes, _ = outputs.infer_type_partial(**{node["name"]: "float32" for node in inputs})
    found = [name for name, dtype in zip(outputs.list_outputs(), dtypes) if dtype == BFLOAT16]
    return {name[: -len("_output")] for name in found}


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
