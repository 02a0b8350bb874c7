"""Compiled gathering of vectors through shared memory: every process gets those of all."""

import numpy as np
from numba import carray, types

from ....engine.compiled.access import add, address_of_field, load, pointer, record_type, store, words
from ....engine.compiled.functions import compiled
from ...flight_recorder import compiled_record as recorder
from .compiled_waiting import all_arrived, group_at, key_at, line_at, ring, wait_for_bell
from .layout import LINE, Group, Key

_PATIENCE = 200  # looks, some microseconds, before one who waits sleeps; on few cores it must not take longer
_i64 = types.int64


@compiled(types.boolean(record_type(Group), record_type(Key), _i64))
def _wait_for_all(group, key, number):
    """Wait, no longer than the group says, until all have arrived; whether they have."""
    line = line_at(key.lines + group.rank * LINE)
    for _ in range(_PATIENCE):
        if all_arrived(group, key, number):
            return True
    bell = load(line, "bell")
    store(line, "sleeps", 1)
    if not all_arrived(group, key, number):
        wait_for_bell(line, bell, address_of_field(group, "seconds"))
    store(line, "sleeps", 0)
    return all_arrived(group, key, number)


@compiled(types.int64(_i64, _i64, _i64, _i64, _i64), called_from_python=True)
def gather(group_address, key_address, number, vector, out):
    """All rows go to `out`, this process's being `vector`, or 0 if it is there already; whether all have arrived."""
    group, key = group_at(group_address), key_at(key_address)
    size, rank, num_bytes = group.size, group.rank, key.num_values
    rows = words(key.rows, 2 * size)[number % 2 * size :]  # who arrives has left the call before the last: two rows do
    line = line_at(key.lines + rank * LINE)
    if vector != 0:
        key.record = recorder.begin(group.recorder, key.name, number, num_bytes)
        target = carray(pointer(rows[rank]), num_bytes, np.uint8)
        target[:] = carray(pointer(vector), num_bytes, np.uint8)
        store(line, "arrived", number)
        add(line_at(group.lines + rank * LINE), "beat", 1)
        if all_arrived(group, key, number):
            for other in range(size):
                if other != rank:
                    ring(line_at(key.lines + other * LINE))
    if not _wait_for_all(group, key, number):
        return 0
    for other in range(size):
        target = carray(pointer(out + other * num_bytes), num_bytes, np.uint8)
        target[:] = carray(pointer(rows[other]), num_bytes, np.uint8)
    store(line, "left", number)
    recorder.end(group.recorder, key.record, True)
    return 1
