"""The exchange with other processes: through shared memory without Python where the store can, else by Python."""

import numpy as np
from numba import carray, from_dtype, types

from ....engine.atomics import compiled, get, pointer, put, vector
from ....kvstore.mpi.shared_memory import compiled_gather as shared_memory
from ..operator_state import EXCHANGE
from ..rendezvous import PROCESSES, RENDEZVOUS
from .c_functions import ask_python, pthread_mutex_lock, pthread_mutex_unlock
from .combine import combine

_HEADER = 2  # see `exchange`: 1, and the number of the call
_i64, _Vector = types.int64, types.float64[::1]
_Processes = from_dtype(PROCESSES)


@compiled(types.boolean(_Processes, _i64, _i64, _Vector))
def _through_shared_memory(record, call, direction, values):
    """Whether the values have become those of all processes; if not, Python finishes what has begun."""
    turn = get(record.key, shared_memory.TURN)
    length = _HEADER + values.size
    row = vector(record.row, length)
    row[0], row[1] = 1.0, call
    row[_HEADER:] = values
    put(record.key, shared_memory.TURN, turn + 1)
    if not shared_memory.gather(record.store, record.key, turn, record.row, record.rows):
        return False  # the others are late
    rows = carray(pointer(record.rows), (record.num_processes, length), np.float64)
    for number in range(record.num_processes):
        if rows[number, 0] != 1.0 or rows[number, 1] != call:
            return False  # Python says who is out of step
    combine(rows[:, _HEADER:], direction, values)
    return True


@compiled(types.boolean(from_dtype(RENDEZVOUS), _i64, _Vector, _i64))
def exchange(layer, key, values, operator):
    """Whether `values` have become those of all processes; if not, the layer's barrier is closed."""
    call, direction = key // 2, key % 2
    address = layer.exchanges[direction]
    if address == 0:
        return ask_python(operator, EXCHANGE, key, values.ctypes.data) == 0
    record = carray(pointer(address), 1, PROCESSES)[0]
    pthread_mutex_lock(record.mutex)
    done = _through_shared_memory(record, layer.earlier_calls + call, direction, values)
    if not done:
        done = ask_python(operator, EXCHANGE, -1 - key, values.ctypes.data) == 0
    pthread_mutex_unlock(record.mutex)
    return done
