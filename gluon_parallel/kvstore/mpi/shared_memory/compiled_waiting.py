"""Compiled waiting of processes on words of shared memory: bells, and who has come how far."""

# mypy: ignore-errors
# Numba reads these functions, Python never runs them.

from numba import types

from ....engine.atomics import WORD, add, compiled, get, system_call
from .layout import FUTEX, LINE, SIZE, SYSCALL

_WAIT, _WAKE = 0, 1  # of futex(2)
_i64 = types.int64


@compiled(types.void(_i64, _i64, _i64, _i64))
def ring(group, line, bell, sleeps):
    """Count up the word `bell` of that line, and wake who sleeps on it."""
    add(line + bell * WORD, 1)
    if get(line, sleeps):
        system_call(get(group, SYSCALL), get(group, FUTEX), line + bell * WORD, _WAKE, 1, 0)


@compiled(types.void(_i64, _i64, _i64, _i64))
def wait_for_bell(group, word, value, limit):
    """Sleep until the word at that address is not `value` any more; `limit` is the address of a time, or 0."""
    system_call(get(group, SYSCALL), get(group, FUTEX), word, _WAIT, value & 0xFFFFFFFF, limit)


@compiled(types.boolean(_i64, _i64, _i64, _i64))
def all_at(group, lines, which, number):
    """Whether every process's word `which` at this key is at least `number`."""
    for rank in range(get(group, SIZE)):
        if get(lines + rank * LINE, which) < number:
            return False
    return True
