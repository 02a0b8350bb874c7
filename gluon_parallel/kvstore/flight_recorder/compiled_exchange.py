"""Compiled engine functions that record when an exchange's arrays are ready, and when its results are there."""

# mypy: ignore-errors
# Numba reads these functions, Python never runs them.

import numba
from numba import types

from ...engine.atomics import address, call, compiled, words
from . import compiled_record
from .layout import BUSY, EXCHANGE_CALL, EXCHANGE_NAME, EXCHANGE_SIZE, EXCHANGE_WORDS, RECORD, WHERE

_function = types.void(types.voidptr, types.voidptr, types.voidptr)


@compiled(types.void(types.voidptr))
def _complete(on_complete):
    """Tell the engine that its function has ended."""
    ended = words(address(on_complete), 3)
    call(ended[0], ended[1], ended[2], 0)


@compiled(_function, make=numba.cfunc)
def begin(_run_context, on_complete, exchange):
    """Record that this process has come to the exchange of these words."""
    one = words(address(exchange), EXCHANGE_WORDS)
    one[RECORD] = compiled_record.begin(one[WHERE], one[EXCHANGE_NAME], one[EXCHANGE_CALL], one[EXCHANGE_SIZE])
    _complete(on_complete)


@compiled(_function, make=numba.cfunc)
def end(_run_context, on_complete, exchange):
    """Record that it is done; its words are free for the next one."""
    one = words(address(exchange), EXCHANGE_WORDS)
    compiled_record.end(one[WHERE], one[RECORD], True)
    one[BUSY] = 0
    _complete(on_complete)
