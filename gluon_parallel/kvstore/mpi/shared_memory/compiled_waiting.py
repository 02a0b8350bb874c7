"""Compiled waiting of processes on words of shared memory: wake-up counters, and the progress of each process."""

from numba import types

from ....engine.atomics import WORD, add, c_function, compiled, get
from .layout import FUTEX, LINE, SIZE

_WAIT, _WAKE = 0, 1  # of futex(2)
_i64 = types.int64
_syscall = c_function("syscall", 7)


@compiled(types.void(_i64, _i64, _i64))
def ring(line, bell, sleeps):
    """Count up the word `bell` of that line, and wake who sleeps on it."""
    add(line + bell * WORD, 1)
    if get(line, sleeps):
        _syscall(FUTEX, line + bell * WORD, _WAKE, 1, 0, 0, 0)


@compiled(types.void(_i64, _i64, _i64))
def wait_for_bell(word, value, limit):
    """Sleep until the word at that address is not `value` any more; `limit` is the address of a time, or 0."""
    _syscall(FUTEX, word, _WAIT, value & 0xFFFFFFFF, limit, 0, 0)


@compiled(types.boolean(_i64, _i64, _i64, _i64))
def all_at(group, lines, which, number):
    """Whether every process's word `which` at this key is at least `number`."""
    for rank in range(get(group, SIZE)):
        if get(lines + rank * LINE, which) < number:
            return False
    return True
