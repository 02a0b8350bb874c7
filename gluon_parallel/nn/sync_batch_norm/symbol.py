"""The layer as a symbol, for nets that are put together from symbols."""

from __future__ import annotations

import json
import uuid
from typing import Any

from ...compat import mx
from . import graph, sync_group


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
        sync_group.hand_over(options["token"], kvstore)
    attributes = {graph.MARK: json.dumps(options)}
    return mx.sym.BatchNorm(data, gamma, beta, moving_mean, moving_var, name=name, attr=attributes, **batch_norm)
