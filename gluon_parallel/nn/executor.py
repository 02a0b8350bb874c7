"""Graphs and parameters of hybridized blocks: one thread makes them at the first call; MXNet runs rewritten graphs."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Callable

from ..allreduce import gradients
from ..mxnet.blocks import (
    Executor,
    add_hook,
    backend_of,
    executor_inputs,
    executor_of,
    flatten,
    infer_shapes,
    own_parameters,
)
from ..mxnet.compat import mx
from ..mxnet.compat.replacing import stands_for
from ..mxnet.parameters import draw_first_values, has_values, waits_for_shape
from .for_cpu import for_cpu, is_faster_on
from .frozen_weights import DenseLayer, dense_layers, with_weight_gradients
from .sync_batch_norm.graph import synchronised
from .sync_batch_norm.participants import SynchronisedExecutor

_Flags = Sequence[tuple[str, Any]]
_building = threading.local()  # .block: the block whose graph this thread builds
_lock = threading.RLock()
_waiting: weakref.WeakSet[mx.gluon.Parameter] = weakref.WeakSet()  # parameters whose shapes were not known
_forward_in_mxnet = mx.gluon.HybridBlock.forward
_making = 0  # how many calls, one within the other, of the thread that has the lock make something
# A forked child must not get the lock in a locked state.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def build_cache(build_in_mxnet: Callable[..., None], block: mx.gluon.HybridBlock, *args: Any) -> None:
    """Build the graph of a block, unless another thread has built it meanwhile."""
    with _alone(), building(block):
        if executor_of(block) is None or backend_of(block) is not None:  # which `optimize_for` sets, to build it anew
            build_in_mxnet(block, *args)


@contextlib.contextmanager
def building(block: mx.gluon.HybridBlock) -> Iterator[None]:
    """Within this block of code, executors are made for the graph of that block."""
    before = getattr(_building, "block", None)
    _building.block = block
    try:
        yield
    finally:
        _building.block = before


def initialize(initialize_in_mxnet: Callable[..., None], parameter: mx.gluon.Parameter, *args: Any, **kw: Any) -> None:
    """Initialize a parameter as MXNet does; blocks are watched until all of unknown shapes have one."""
    initialize_in_mxnet(parameter, *args, **kw)
    if waits_for_shape(parameter):
        with _lock:
            _waiting.add(parameter)
            if mx.gluon.HybridBlock.forward is _forward_in_mxnet:
                mx.gluon.HybridBlock.forward = forward


@stands_for(_forward_in_mxnet, mx.gluon.HybridBlock, "forward")
def forward(block: mx.gluon.HybridBlock, x: Any, *args: Any) -> Any:
    """Call a block; before that, make the parameters whose shapes follow from its input.

    It replaces MXNet's method as long as parameters wait for a shape. One that MXNet has begun to make counts as not
    initialized in other threads, then as one without gradient.
    """
    parameters = own_parameters(block).values()
    for parameter in parameters:  # a loop, because every layer of a net that is not hybridized asks
        if not has_values(parameter) or _making:
            finish_initialization(block, (x, *args), parameters)
            break
    return _forward_in_mxnet(block, x, *args)


def finish_initialization(
    block: mx.gluon.HybridBlock, args: Sequence[Any], parameters: Iterable[mx.gluon.Parameter]
) -> None:
    """Make those of a block's parameters whose shapes follow from its inputs, if these are arrays."""
    if any(isinstance(one, mx.sym.Symbol) for one in flatten(args, "input")[0]):
        return
    with _alone():
        waiting = [parameter for parameter in parameters if waits_for_shape(parameter)]
        if waiting:
            infer_shapes(block, *args)
            for parameter in waiting:
                draw_first_values(parameter)
        if not any(waits_for_shape(parameter) for parameter in _waiting):
            _waiting.clear()
            if mx.gluon.HybridBlock.forward is forward:
                mx.gluon.HybridBlock.forward = _forward_in_mxnet


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    global _making
    with _lock:
        _making += 1
        try:
            yield
        finally:
            _making -= 1


def executor(sym: mx.sym.Symbol, flags: _Flags = ()) -> mx.nd.CachedOp:
    """MXNet's executor of a graph after two passes: :func:`.for_cpu`, then :func:`.synchronised`.

    Inputs for which the first pass is not meant go through the second alone. For dense
    layers whose weight is frozen see :mod:`.frozen_weights`.
    """
    block = getattr(_building, "block", None)
    faster = for_cpu(sym, block)
    running = _synchronised(faster, flags, block)
    if faster is sym:
        return running
    first_input = dict(flags).get("data_indices", [0])[0]
    return _Faster(running, _synchronised(sym, flags, block), first_input)


def _synchronised(symbol: mx.sym.Symbol, flags: _Flags, block: mx.gluon.Block | None) -> mx.nd.CachedOp:
    symbol, groups = synchronised(symbol, block)
    if groups:
        # With `static_shape` MXNet does not tell its engine that the operator changes the running statistics, so what
        # else touches them at that time, such as the trainer's first step, which copies all parameters, may undo an
        # update.
        flags = [(name, value) for name, value in flags if name != "static_shape"]
    parameters = []
    if block is not None and dict(flags).get("static_shape"):
        parameters = [one for is_input, one in executor_inputs(block) if not is_input]
    layers = dense_layers(symbol, block)

    def make(numbers: Sequence[int]) -> mx.nd.CachedOp:
        graph = with_weight_gradients(symbol, numbers) if numbers else symbol
        return SynchronisedExecutor(graph, flags, groups) if groups else Executor(graph, flags)

    return _Following(make, layers, parameters) if layers or parameters else make([])


class _AnyExecutor(type):
    """Type of :class:`CachedOp`, whose instances are MXNet's executors and those that are made in their place."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return executor(*args, **kwargs) if cls is CachedOp else super().__call__(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Executor) if cls is CachedOp else super().__instancecheck__(instance)


class CachedOp(Executor, metaclass=_AnyExecutor):
    """The class that stands for MXNet's, and makes what :func:`executor` does; classes derived from it are MXNet's."""

    __slots__ = ()
    __signature__ = inspect.signature(Executor)


class _Others(Executor):
    """Calls other executors, of which one has the handle and frees it."""

    def __init__(self, executor: mx.nd.CachedOp) -> None:
        self._monitor_callback = None
        self._stand_for(executor)

    def _stand_for(self, executor: mx.nd.CachedOp) -> None:
        self.handle, self.is_np_sym = executor.handle, executor.is_np_sym

    def __del__(self) -> None:
        """Leave the handle to the executor whose it is."""


class _Following(_Others):
    """Executors of one graph, of which a call takes the one for the gradients that its parameters have now.

    MXNet's executor with ``static_shape`` keeps pointers to the gradients of the last pass on each device. Those of a
    parameter that was frozen, and trained again without a pass on that device meanwhile, may be where the old ones
    were, so that MXNet takes them for the same. So it is made anew where a parameter has got other gradients.

    Args:
        make: makes the executor in which the dense layers of these numbers, those with a frozen weight and a trained
            bias, compute the gradient of their weight; see :mod:`.frozen_weights`.
        layers: all dense layers of which that may be asked.
        parameters: those whose new gradients need a new executor.
    """

    def __init__(
        self, make: Callable[[Sequence[int]], mx.nd.CachedOp], layers: Sequence[DenseLayer],
        parameters: Sequence[mx.gluon.Parameter],
    ) -> None:  # fmt: skip
        self._make, self._layers, self._parameters = make, layers, parameters
        self._made: dict[tuple[int, ...], mx.nd.CachedOp] = {}  # by the numbers of layers
        self._numbers: list[int] = []  # of the gradients of `_parameters`
        self._hooks: list[tuple] = []
        self._choose()
        super().__init__(self._running)

    def __call__(self, *args: mx.nd.NDArray, **kwargs: Any) -> Any:
        if self._num_changes != gradients.num_changes:  # of whatever parameter
            self._choose()
        return self._running(*args, **kwargs)

    def _choose(self) -> None:
        with _lock:
            num_changes = gradients.num_changes
            numbers = [gradients.numbers.get(parameter, 0) for parameter in self._parameters]
            if numbers != self._numbers:
                self._made.clear()
            layers = tuple(layer.number for layer in self._layers if layer.is_wrong())
            if layers not in self._made:
                self._made[layers] = self._make(layers)
                for hook in self._hooks:
                    add_hook(self._made[layers], *hook)
            self._running, self._numbers = self._made[layers], numbers
            self._stand_for(self._running)
            self._num_changes = num_changes  # last: other threads do not wait from here on

    def _register_op_hook(self, callback: Any, monitor_all: bool = False) -> None:
        self._hooks.append((callback, monitor_all))
        for executor in self._made.values():
            add_hook(executor, callback, monitor_all)


class _Faster(_Others):
    """Two executors of one graph: a faster one for inputs that it suits, and the other one."""

    def __init__(self, faster: mx.nd.CachedOp, plain: mx.nd.CachedOp, first_input: int) -> None:
        self._faster, self._plain, self._first_input = faster, plain, first_input
        super().__init__(faster)

    def __call__(self, *args: mx.nd.NDArray, **kwargs: Any) -> Any:
        chosen = self._faster if is_faster_on(args[self._first_input]) else self._plain
        return chosen(*args, **kwargs)

    def _register_op_hook(self, *args: Any, **kwargs: Any) -> None:
        add_hook(self._faster, *args, **kwargs)
        add_hook(self._plain, *args, **kwargs)
