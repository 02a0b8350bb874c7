"""Compiled waiting of processes on words of shared memory: wake-up counters, and the progress of each process."""

from numba import types

from ....engine.compiled.access import add, address_of_field, load, record_at, record_type
from ....engine.compiled.functions import c_function, compiled
from .layout import FUTEX, LINE, Group, Key, Line

_WAIT, _WAKE = 0, 1  # of futex(2)
_i64, _Line = types.int64, record_type(Line)
_syscall = c_function("syscall", 7)
group_at, key_at, line_at = map(record_at, (Group, Key, Line))


@compiled(types.void(_Line))
def ring(line):
    """Count up the bell of that line, and wake the thread that sleeps on it."""
    add(line, "bell", 1)
    if load(line, "sleeps"):
        _syscall(FUTEX, address_of_field(line, "bell"), _WAKE, 1, 0, 0, 0)


@compiled(types.void(_Line, _i64, _i64))
def wait_for_bell(line, value, limit):
    """Sleep until the bell of that line is not `value` any more; `limit` is the address of a time, or 0."""
    _syscall(FUTEX, address_of_field(line, "bell"), _WAIT, value & 0xFFFFFFFF, limit, 0, 0)


@compiled(types.boolean(record_type(Group), record_type(Key), _i64))
def all_arrived(group, key, number):
    """Whether every process has arrived at the key's exchange of that number."""
    for rank in range(group.size):
        if load(line_at(key.lines + rank * LINE), "arrived") < number:
            return False
    return True


@compiled(types.boolean(record_type(Group), record_type(Key), _i64))
def all_left(group, key, number):
    """Whether every process has read the rows of the key's exchange of that number."""
    for rank in range(group.size):
        if load(line_at(key.lines + rank * LINE), "left") < number:
            return False
    return True
