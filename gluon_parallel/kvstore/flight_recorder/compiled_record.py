"""Compiled recording of what begins and ends without Python."""

import ctypes

from numba import types

from ...engine.compiled.access import add, load, now, record_at, record_type, store
from ...engine.compiled.functions import MONOTONIC, compiled
from .layout import CAPACITY, COMPILED_RING, LEFT_TO_PYTHON, Head, Place, RingEntry

_i64, _RING, _SIZE = types.int64, COMPILED_RING, ctypes.sizeof(RingEntry)
_place_at, _head_at, _entry_at = map(record_at, (Place, Head, RingEntry))


@compiled(record_type(RingEntry)(_i64, _i64))
def _entry(place, number):
    """The entry of that number; `place` is the address of the recorder's Place."""
    return _entry_at(load(_place_at(place), "memory") + _RING + number % CAPACITY * _SIZE)


@compiled(_i64(_i64, _i64, _i64, _i64))
def begin(place, name, call, size):
    """Record that call number `call` of `name` begins; returns the entry's number, for :func:`end`."""
    number = add(_head_at(load(_place_at(place), "memory")), "num_begun", 1) + 1
    entry = _entry(place, number)
    entry.number = 0  # whoever reads it now sees no entry
    entry.name, entry.call, entry.size = name, call, size
    entry.asked, entry.done = now(MONOTONIC), 0
    store(entry, "number", number)
    return number


@compiled(types.void(_i64, _i64, types.boolean))
def end(place, number, is_done):
    """Record that it is done, or goes on in Python, unless so much was recorded since that its entry is gone."""
    entry = _entry(place, number)
    if entry.number == number:
        entry.done = now(MONOTONIC) if is_done else LEFT_TO_PYTHON
