"""First calls of a block: parameters and graphs are made by one thread, and other threads wait for it."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Callable

from ..compat import mx

_lock = threading.RLock()
_waiting: weakref.WeakSet[mx.gluon.Parameter] = weakref.WeakSet()  # parameters whose shapes were not known
_forward_in_mxnet = mx.gluon.HybridBlock.forward
_making = 0  # how many calls, one within the other, of the thread that has the lock make something
# A forked child must not get the lock in a locked state.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def build_cache(build_in_mxnet: Callable[..., None], block: mx.gluon.HybridBlock, *args: Any) -> None:
    """Build the graph of a block, unless another thread has built it meanwhile."""
    with _alone():
        if block._cached_op is None or block._backend is not None:  # which `optimize_for` sets, to build it anew
            build_in_mxnet(block, *args)


def initialize(initialize_in_mxnet: Callable[..., None], parameter: mx.gluon.Parameter, *args: Any, **kw: Any) -> None:
    """Initialize a parameter as MXNet does; blocks are watched until all of unknown shapes have one."""
    initialize_in_mxnet(parameter, *args, **kw)
    if parameter._deferred_init:
        with _lock:
            _waiting.add(parameter)
            if mx.gluon.HybridBlock.forward is _forward_in_mxnet:
                mx.gluon.HybridBlock.forward = forward


def forward(block: mx.gluon.HybridBlock, *args: Any) -> Any:
    """Call a block; before that, make the parameters whose shapes follow from its input.

    It replaces MXNet's method as long as parameters wait for a shape. One that MXNet has begun to make counts as not
    initialized in other threads, then as one without gradient.
    """
    parameters = block._reg_params.values()
    for parameter in parameters:  # a loop, because every layer of a net that is not hybridized asks
        if parameter._data is None or _making:
            finish_initialization(block, args, parameters)
            break
    return _forward_in_mxnet(block, *args)


def finish_initialization(
    block: mx.gluon.HybridBlock, args: Sequence[Any], parameters: Iterable[mx.gluon.Parameter]
) -> None:
    """Make those of a block's parameters whose shapes follow from its inputs, if these are arrays."""
    if any(isinstance(one, mx.sym.Symbol) for one in mx.gluon.block._flatten(args, "input")[0]):
        return
    with _alone():
        waiting = [parameter for parameter in parameters if parameter._deferred_init]
        if waiting:
            block._deferred_infer_shape(*args)
            for parameter in waiting:
                parameter._finish_deferred_init()
        if not any(parameter._deferred_init for parameter in _waiting):
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
