"""Compiled engine functions that record when an exchange's arrays are ready, and when its results are there."""

from numba import types

from ...engine.compiled.access import address, record_at
from ...engine.compiled.functions import c_callback, call, compiled
from ...engine.functions import OnComplete
from . import compiled_record
from .layout import Exchange

_function = types.void(types.voidptr, types.voidptr, types.voidptr)
_exchange_at, _on_complete_at = map(record_at, (Exchange, OnComplete))


@compiled(types.void(types.voidptr))
def _complete(on_complete):
    """Tell the engine that its function has ended."""
    ended = _on_complete_at(address(on_complete))
    call(ended.callback, ended.engine, ended.param, 0)


@c_callback(_function)
def begin(_run_context, on_complete, exchange):
    """Record that this process has come to this exchange."""
    one = _exchange_at(address(exchange))
    one.record = compiled_record.begin(one.place, one.name, one.call, one.size)
    _complete(on_complete)


@c_callback(_function)
def end(_run_context, on_complete, exchange):
    """Record that it is done; its record is free for the next one."""
    one = _exchange_at(address(exchange))
    compiled_record.end(one.place, one.record, True)
    one.busy = 0
    _complete(on_complete)
