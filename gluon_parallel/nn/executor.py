"""Executor of hybridized graphs: MXNet runs what the passes make of a net's graph, and the net keeps its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Callable

from ..compat import mx
from ..device_threads import launch_by_device
from .for_cpu import for_cpu, is_faster_on
from .sync_batch_norm.graph import synchronised
from .sync_batch_norm.start import enter

_Flags = Sequence[tuple[str, Any]]
_building = threading.local()  # .block: the block whose graph this thread builds


class _Synchronised(mx.nd.CachedOp):
    """MXNet's executor after the last pass: marked BatchNorm nodes synchronise.

    It checks in with the groups of the graph before every call, for it is the last Python code that runs before the
    call is in the engine's hands.

    `static_shape` is left out (`static_alloc` stays): with it MXNet does not tell its engine that the operator changes
    the running statistics, so whatever else touches them at that time, such as the trainer's first step, which copies
    all parameters, may undo an update.
    """

    def __init__(self, symbol: mx.sym.Symbol, flags: _Flags, block: mx.gluon.Block | None) -> None:
        running, self.groups = synchronised(symbol, block)
        if self.groups:
            flags = [(name, value) for name, value in flags if name != "static_shape"]
        super().__init__(running, flags)

    def __call__(self, *args: mx.nd.NDArray, **kwargs: Any) -> Any:
        if self.groups:
            launch_by_device()
            if mx.autograd.is_training():
                enter(self.groups, args[0].ctx)
        return super().__call__(*args, **kwargs)


class Executor(_Synchronised):
    """MXNet's executor with two passes: :func:`.for_cpu`, then :func:`.synchronised`.

    Inputs for which the first pass is not meant go through the second alone.
    """

    def __init__(self, sym: mx.sym.Symbol, flags: _Flags = ()) -> None:
        block = getattr(_building, "block", None)
        faster = for_cpu(sym, block)
        super().__init__(faster, flags, block)
        self._original = None if faster is sym else _Synchronised(sym, flags, block)
        self._first_input = dict(flags).get("data_indices", [0])[0]

    def __call__(self, *args: mx.nd.NDArray, **kwargs: Any) -> Any:
        if self._original is not None and not is_faster_on(args[self._first_input]):
            return self._original(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _register_op_hook(self, *args: Any, **kwargs: Any) -> None:
        if self._original is not None:
            self._original._register_op_hook(*args, **kwargs)
        super()._register_op_hook(*args, **kwargs)


def note_block(build_cache: Callable[..., Any], block: mx.gluon.HybridBlock, *args: Any) -> Any:
    """Note the block whose graph is built, for the executor that is made at its end."""
    before = getattr(_building, "block", None)
    _building.block = block
    try:
        return build_cache(block, *args)
    finally:
        _building.block = before
