"""Compiled gathering of vectors through shared memory: every process gets those of all."""

import numpy as np
from numba import carray, types

from ....engine.atomics import WORD, add, compiled, get, pointer, put
from ...flight_recorder import compiled_record as recorder
from .compiled_waiting import all_at, ring, wait_for_bell

from .layout import (  # isort: skip
    ARRIVED, BEAT, KEY_BELL, KEY_LINES, KEY_NAME, KEY_RECORD, KEY_SLEEPS, LEFT, LINE, LINES, NUM_VALUES, RANK, RECORDER,
    ROWS, SECONDS, SIZE,
    TURN as TURN,  # for code that enters a gathering by itself
)  # fmt: skip

_PATIENCE = 200  # looks, some microseconds, before one who waits sleeps; on few cores it must not take longer
_i64 = types.int64


@compiled(types.boolean(_i64, _i64, _i64))
def _everyone_came(group, key, number):
    """Wait, no longer than the group says, until all have arrived; whether they have."""
    lines = get(key, KEY_LINES)
    line = lines + get(group, RANK) * LINE
    for _ in range(_PATIENCE):
        if all_at(group, lines, ARRIVED, number):
            return True
    bell = get(line, KEY_BELL)
    put(line, KEY_SLEEPS, 1)
    if not all_at(group, lines, ARRIVED, number):
        wait_for_bell(line + KEY_BELL * WORD, bell, group + SECONDS * WORD)
    put(line, KEY_SLEEPS, 0)
    return all_at(group, lines, ARRIVED, number)


@compiled(types.boolean(_i64, _i64, _i64, _i64, _i64), nogil=True)
def gather(group, key, number, vector, out):
    """All rows go to `out`, this process's being `vector`, or 0 if it is there already; whether all have arrived."""
    lines, size, rank = get(key, KEY_LINES), get(group, SIZE), get(group, RANK)
    num_values = get(key, NUM_VALUES)
    rows = key + (ROWS + number % 2 * size) * WORD  # who arrives has left the call before the last one: two rows do
    if vector != 0:
        put(key, KEY_RECORD, recorder.begin(get(group, RECORDER), get(key, KEY_NAME), number, num_values))
        target = carray(pointer(get(rows, rank)), num_values, np.uint8)
        target[:] = carray(pointer(vector), num_values, np.uint8)
        put(lines + rank * LINE, ARRIVED, number)
        add(get(group, LINES) + rank * LINE + BEAT * WORD, 1)
        if all_at(group, lines, ARRIVED, number):
            for other in range(size):
                if other != rank:
                    ring(lines + other * LINE, KEY_BELL, KEY_SLEEPS)
    if not _everyone_came(group, key, number):
        return False
    for other in range(size):
        target = carray(pointer(out + other * num_values), num_values, np.uint8)
        target[:] = carray(pointer(get(rows, other)), num_values, np.uint8)
    put(lines + rank * LINE, LEFT, number)
    recorder.end(get(group, RECORDER), get(key, KEY_RECORD), True)
    return True
