"""All-reduce of the statistics over the devices of one layer and all processes, as long as nothing goes wrong.

Each device copies its row into a slot; the last one combines the rows in the devices' order, exchanges the result with
the other processes, through shared memory where the store can, and wakes the others. What takes longer than a moment,
and all that is not as it should be, is left to Python: the slot is marked, and every device that was or comes there
goes on to the layer's `Barrier`, which knows about limits, names and failures.
"""

import ctypes

import numpy as np
from numba import carray, types

from ....engine.compiled.access import load, now, pointer, record_at, record_type, store, vector, wait_until
from ....kvstore.compiled_combine import combine
from ....kvstore.exchange import HEADER
from ....kvstore.flight_recorder import compiled_record as recorder
from ....kvstore.mpi.shared_memory import compiled_gather as shared_memory
from ..operator_state import State
from ..rendezvous import NUM_PASSES, NUM_SLOTS, Layer, PassTimes, Processes, Slot
from .c_functions import allreduce_processes_in_python

from ....engine.compiled.functions import (  # isort: skip
    MONOTONIC, compiled, pthread_cond_broadcast, pthread_mutex_lock, pthread_mutex_unlock,
)  # fmt: skip

FORWARD, BACKWARD = range(2)  # directions; the key of call n is 2 n + direction
FREE, GATHERING, COMPLETE, REDUCED, LEFT_TO_PYTHON = range(5)  # states of a slot

_i64, _Vector = types.int64, types.float64[::1]
_Layer, _Slot, _Processes = map(record_type, (Layer, Slot, Processes))
layer_at, _slot_at, _times_at, _processes_at = map(record_at, (Layer, Slot, PassTimes, Processes))
_SLOT, _TIMES = ctypes.sizeof(Slot), ctypes.sizeof(PassTimes)


@compiled(types.boolean(_Processes, _i64, _i64, _Vector))
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


@compiled(types.boolean(_Layer, _i64, _Vector, _i64))
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


@compiled(_i64(_Layer, _i64))
def _length(layer, key):
    """How many numbers a row has: a count, and two numbers per channel; without the count on the way back."""
    return 2 * layer.channels + (1 if key % 2 == FORWARD else 0)


@compiled(types.float64[:, ::1](_Layer, _Slot))
def _rows(layer, slot):
    """The result, and a row for each device."""
    return carray(pointer(slot.rows), (1 + layer.num_rows, 1 + 2 * layer.channels), np.float64)


@compiled(_i64(_Layer, _i64))
def _find(layer, key):
    """The number of the slot of `key`, or of a free one, which becomes it; -1 if there is none."""
    free = abandoned = -1
    for number in range(NUM_SLOTS):
        slot = _slot_at(layer.slots + number * _SLOT)
        if slot.state == FREE:
            free = number
        elif slot.state != REDUCED and slot.key == key:
            return number  # (no device comes to one that has ended)
        elif slot.state == LEFT_TO_PYTHON and slot.left == slot.arrived:
            abandoned = number  # no device is in it, and the others may never come this way
    found = free if free >= 0 else abandoned
    if found >= 0:
        slot = _slot_at(layer.slots + found * _SLOT)
        slot.state, slot.key = GATHERING, key
        slot.arrived = slot.left = slot.record = 0
        _rows(layer, slot)[:] = 0.0  # as from devices that take no part
        if layer.devices & (layer.devices - 1) != 0:  # several
            name = layer.names[key % 2]
            slot.record = recorder.begin(layer.recorder, name, key // 2 + 1, 8 * _length(layer, key))
    return found


@compiled(types.void(_Layer, _Slot, _i64))
def _end(layer, slot, state):
    slot.state = state
    if slot.record:
        recorder.end(layer.recorder, slot.record, state == REDUCED)
    pthread_cond_broadcast(slot.changed)


@compiled(types.void(_Layer, _Slot, _i64))
def _complete(layer, slot, operator):
    """All have come: combine their rows, exchange the result with the other processes, and wake the others."""
    slot.state, slot.complete_at = COMPLETE, now(MONOTONIC)
    rows = _rows(layer, slot)
    result = rows[0][: _length(layer, slot.key)]
    combine(rows[1:], slot.key % 2, result)
    state = REDUCED
    if layer.spans_processes:
        pthread_mutex_unlock(layer.mutex)
        if not allreduce_processes(layer, slot.key, result, operator):
            state = LEFT_TO_PYTHON  # where the barrier is closed by now
        pthread_mutex_lock(layer.mutex)
    _end(layer, slot, state)


@compiled(types.void(_Layer, _Slot))
def _wait(layer, slot):
    """Until the exchange has ended; if devices are still missing after a moment, end it."""
    end = now(MONOTONIC) + layer.patience
    while slot.state in (GATHERING, COMPLETE):
        if wait_until(slot.changed, layer.mutex, end) != 0:
            if slot.state == GATHERING:
                _end(layer, slot, LEFT_TO_PYTHON)
            end += layer.patience  # all have come: the exchange with other processes has a limit of its own


@compiled(_i64(_Layer, _i64, _i64, _i64, _i64))
def _allreduce(layer, key, device, message, operator):
    """:func:`allreduce`, while the layer's mutex is held."""
    number = _find(layer, key)
    if number < 0:
        return 0
    slot = _slot_at(layer.slots + number * _SLOT)
    if slot.arrived >> device & 1:
        return 0  # twice: the barrier says so
    values = vector(message, _length(layer, key))
    rows = _rows(layer, slot)
    rows[1 + device, : values.size] = values
    slot.arrived |= 1 << device
    if slot.state == GATHERING and slot.arrived == layer.devices:
        _complete(layer, slot, operator)
    else:
        _wait(layer, slot)
    complete_at = 0
    if slot.state == REDUCED:
        values[:] = rows[0, : values.size]
        complete_at = slot.complete_at
    slot.left |= 1 << device
    if slot.left == layer.devices:
        slot.state = FREE
    return complete_at


@compiled(_i64(_i64, _i64, _i64, _i64, _i64))
def allreduce(address, key, device, message, operator):
    """Bring a message to the exchange at `key` of the Layer at `address`; that of all replaces it.

    The message is at an address: (1 + 2 C,) float64, a shard's moments; or (2 C,), two sums. Python finds the layer by
    `operator` where it has to exchange with other processes. A device that is not known has a number below 0.

    Returns when the last device of this process arrived, in nanoseconds of the monotonic clock; 0 if not all arrived,
    the message is as it was, and Python has to do it.
    """
    layer = layer_at(address)
    pthread_mutex_lock(layer.mutex)
    complete_at = 0
    if device >= 0 and layer.is_open != 0 and layer.devices >> device & 1 != 0:
        complete_at = _allreduce(layer, key, device, message, operator)
    pthread_mutex_unlock(layer.mutex)
    return complete_at


@compiled(types.void(record_type(State), _i64, _i64, _i64))
def add_spent(op, direction, began, processor):
    """A pass that began then has ended, and took so much processor time."""
    layer, ended = layer_at(op.layer), now(MONOTONIC)
    if op.arrived_at < began:  # it exchanged nothing
        op.arrived_at = op.complete_at = op.reduced_at = ended
    elif op.complete_at == 0:  # Python did it: all of it counts as waiting for devices
        op.complete_at = op.reduced_at
    pthread_mutex_lock(layer.mutex)
    layer.in_callbacks += ended - began
    layer.processor += processor
    layer.waited += op.complete_at - op.arrived_at
    layer.exchanged += op.reduced_at - op.complete_at
    if layer.passes != 0:
        one = _times_at(layer.passes + layer.num_passes % NUM_PASSES * _TIMES)
        layer.num_passes += 1
        one.device, one.key, one.began, one.ended = op.device, 2 * op.call + direction, began, ended
        one.arrived, one.complete, one.reduced = op.arrived_at, op.complete_at, op.reduced_at
    pthread_mutex_unlock(layer.mutex)
