"""Executors of hybridized graphs: MXNet runs what the passes make of a net's graph, and the net keeps its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Callable

from ..compat import mx
from .for_cpu import for_cpu, is_faster_on
from .sync_batch_norm.graph import synchronised
from .sync_batch_norm.start import SynchronisedExecutor

_Flags = Sequence[tuple[str, Any]]
_CachedOp: Any = mx.nd._internal.CachedOp  # MXNet's own, whatever `mx.nd.CachedOp` is
_building = threading.local()  # .block: the block whose graph this thread builds


def executor(sym: mx.sym.Symbol, flags: _Flags = ()) -> mx.nd.CachedOp:
    """MXNet's executor of a graph after two passes: :func:`.for_cpu`, then :func:`.synchronised`.

    Inputs for which the first pass is not meant go through the second alone. A graph that no pass changes gets MXNet's
    executor itself.
    """
    block = getattr(_building, "block", None)
    faster = for_cpu(sym, block)
    running = _synchronised(faster, flags, block)
    if faster is sym:
        return running
    first_input = dict(flags).get("data_indices", [0])[0]
    return _Faster(running, _synchronised(sym, flags, block), first_input)


def _synchronised(symbol: mx.sym.Symbol, flags: _Flags, block: mx.gluon.Block | None) -> mx.nd.CachedOp:
    running, groups = synchronised(symbol, block)
    if not groups:
        return _CachedOp(running, flags)
    # With `static_shape` MXNet does not tell its engine that the operator changes the running statistics, so whatever
    # else touches them at that time, such as the trainer's first step, which copies all parameters, may undo an update.
    return SynchronisedExecutor(running, [(name, value) for name, value in flags if name != "static_shape"], groups)


class _Faster:
    """Two executors of one graph: a faster one for inputs that it suits, and the other one."""

    def __init__(self, faster: mx.nd.CachedOp, plain: mx.nd.CachedOp, first_input: int) -> None:
        self._faster, self._plain, self._first_input = faster, plain, first_input

    def __call__(self, *args: mx.nd.NDArray, **kwargs: Any) -> Any:
        chosen = self._faster if is_faster_on(args[self._first_input]) else self._plain
        return chosen(*args, **kwargs)

    def _register_op_hook(self, *args: Any, **kwargs: Any) -> None:
        self._faster._register_op_hook(*args, **kwargs)
        self._plain._register_op_hook(*args, **kwargs)


def note_block(build_cache: Callable[..., Any], block: mx.gluon.HybridBlock, *args: Any) -> Any:
    """Note the block whose graph is built, for the executor that is made at its end."""
    before = getattr(_building, "block", None)
    _building.block = block
    try:
        return build_cache(block, *args)
    finally:
        _building.block = before
