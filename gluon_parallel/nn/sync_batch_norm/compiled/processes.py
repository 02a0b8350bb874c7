"""All-reduce over processes: through shared memory without Python where the store can, else by Python."""

import numpy as np
from numba import carray, types

from ....engine.compiled.access import load, pointer, record_at, record_type, store, vector
from ....engine.compiled.functions import compiled, pthread_mutex_lock, pthread_mutex_unlock
from ....kvstore.compiled_combine import combine
from ....kvstore.exchange import HEADER
from ....kvstore.mpi.shared_memory import compiled_gather as shared_memory
from ..rendezvous import Layer, Processes
from .c_functions import allreduce_processes_in_python

_i64, _Vector = types.int64, types.float64[::1]
_processes_at = record_at(Processes)


@compiled(types.boolean(record_type(Processes), _i64, _i64, _Vector))
def _through_shared_memory(processes, call, direction, values):
    """Whether the values have become those of all processes; if not, Python finishes what has begun."""
    key = shared_memory.key_at(processes.key)
    turn, length = load(key, "turn"), HEADER + values.size
    row = vector(processes.row, length)
    row[0], row[1] = 1.0, call
    row[HEADER:] = values
    store(key, "turn", turn + 1)
    if not shared_memory.gather(processes.group, processes.key, turn, processes.row, processes.rows):
        return False  # the others are late
    rows = carray(pointer(processes.rows), (processes.num_processes, length), np.float64)
    for number in range(processes.num_processes):
        if rows[number, 0] != 1.0 or rows[number, 1] != call:
            return False  # Python says who is out of step
    combine(rows[:, HEADER:], direction, values)
    return True


@compiled(types.boolean(record_type(Layer), _i64, _Vector, _i64))
def allreduce_processes(layer, key, values, operator):
    """Whether `values` have become those of all processes; if not, the layer's barrier is closed."""
    call, direction = key // 2, key % 2
    if layer.processes[direction] == 0:
        return allreduce_processes_in_python(operator, key, values.ctypes.data, 0) == 0
    processes = _processes_at(layer.processes[direction])
    pthread_mutex_lock(processes.mutex)
    done = _through_shared_memory(processes, layer.earlier_calls + call, direction, values)
    if not done:
        done = allreduce_processes_in_python(operator, key, values.ctypes.data, 1) == 0
    pthread_mutex_unlock(processes.mutex)
    return done
