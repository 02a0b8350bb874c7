"""Compiled recording of what begins and ends without Python."""

# mypy: ignore-errors
# Numba reads these functions, Python never runs them.

from numba import types

from ...engine.atomics import MONOTONIC, WORD, add, compiled, load, now, put, words

from .layout import (  # isort: skip
    ASKED, CALL, CAPACITY, COMPILED_RING, DONE, ENTRY, HEAD, LEFT_TO_PYTHON, NAME, NUMBER, SIZE,
)  # fmt: skip

_i64 = types.int64


@compiled(_i64(_i64, _i64))
def _entry(where, number):
    """The address of that entry; `where` is that of the word that says where the recorder is."""
    return load(where) + (COMPILED_RING + number % CAPACITY * ENTRY) * WORD


@compiled(_i64(_i64, _i64, _i64, _i64))
def begin(where, name, call, size):
    """Record that call number `call` of `name` begins; returns the entry's number, for :func:`end`."""
    number = add(load(where) + HEAD * WORD, 1) + 1
    entry = words(_entry(where, number), ENTRY)
    entry[NUMBER] = 0  # whoever reads it now sees no entry
    entry[NAME], entry[CALL], entry[SIZE] = name, call, size
    entry[ASKED], entry[DONE] = now(MONOTONIC), 0
    put(_entry(where, number), NUMBER, number)
    return number


@compiled(types.void(_i64, _i64, types.boolean))
def end(where, number, is_done):
    """Record that it is done, or goes on in Python, unless so much was recorded since that its entry is gone."""
    entry = words(_entry(where, number), ENTRY)
    if entry[NUMBER] == number:
        entry[DONE] = now(MONOTONIC) if is_done else LEFT_TO_PYTHON
