"""How the devices of one layer exchange statistics, as long as nothing goes wrong.

Each device copies its row into the meeting's memory; whoever comes last combines the rows in the devices' order and
wakes the others. What takes longer than a moment, and all that is not as it should be, is left to Python: the meeting
is marked, and every device that was or comes there goes on to the layer's `Barrier`, which knows about limits, names
and failures.
"""

import numpy as np
from numba import carray, from_dtype, types

from ....engine.atomics import compiled, pointer, vector
from ..rendezvous import MEETING, NUM_MEETINGS, RENDEZVOUS
from .c_functions import (
    MONOTONIC,
    now,
    pthread_cond_broadcast,
    pthread_mutex_lock,
    pthread_mutex_unlock,
    wait_until,
)
from .combine import combine_moments, combine_sums
from .processes import exchange

FORWARD, BACKWARD = range(2)  # directions; the key of call n is 2 n + direction
FREE, GATHERING, COMPLETE, MET, LEFT_TO_PYTHON = range(5)  # states of a meeting

_i64 = types.int64
_Layer, _Meeting = from_dtype(RENDEZVOUS), from_dtype(MEETING)


@compiled(_Layer(_i64))
def rendezvous_at(address):
    """The RENDEZVOUS at that address."""
    return carray(pointer(address), 1, RENDEZVOUS)[0]


@compiled(_i64(_Layer, _i64))
def _length(layer, key):
    """How many numbers a row has: a count, and two numbers per channel; without the count on the way back."""
    return 2 * layer.channels + (1 if key % 2 == FORWARD else 0)


@compiled(_i64(_Layer, _i64))
def _find(layer, key):
    """The number of the meeting at `key`, or of one that can become it; -1 if there is no place for it."""
    meetings = carray(pointer(layer.meetings), NUM_MEETINGS, MEETING)
    free = abandoned = -1
    for number in range(NUM_MEETINGS):
        meeting = meetings[number]
        if meeting.state == FREE:
            free = number
        elif meeting.state != MET and meeting.key == key:
            return number  # (to one that has ended nobody comes any more)
        elif meeting.state == LEFT_TO_PYTHON and meeting.num_left == meeting.num_came:
            abandoned = number  # nobody is in it, and the others may never come this way
    found = free if free >= 0 else abandoned
    if found >= 0:
        meeting = meetings[found]
        meeting.state, meeting.key = GATHERING, key
        meeting.came = meeting.num_came = meeting.num_left = 0
    return found


@compiled(types.void(_Layer, _Meeting, _i64))
def _end(layer, meeting, state):
    meeting.state = state
    pthread_cond_broadcast(meeting.changed)


@compiled(types.void(_Layer, _Meeting, _i64))
def _complete(layer, meeting, operator):
    """All have come: combine their rows, exchange the result with the other processes, and wake the others."""
    meeting.state = COMPLETE
    rows = carray(pointer(meeting.rows), (1 + layer.num_rows, 1 + 2 * layer.channels), np.float64)
    result = rows[0][: _length(layer, meeting.key)]
    if meeting.key % 2 == FORWARD:
        combine_moments(rows[1:], meeting.came, result)
    else:
        combine_sums(rows[1:], meeting.came, result)
    state = MET
    if layer.meets_processes:
        pthread_mutex_unlock(layer.mutex)
        began = now(MONOTONIC)
        if not exchange(layer, meeting.key, result, operator):
            state = LEFT_TO_PYTHON  # where the barrier is closed by now
        pthread_mutex_lock(layer.mutex)
        layer.exchanged += now(MONOTONIC) - began
    _end(layer, meeting, state)


@compiled(types.void(_Layer, _Meeting))
def _wait(layer, meeting):
    """Until the meeting has ended; if devices are still missing after a moment, end it."""
    began = now(MONOTONIC)
    end = began + layer.patience
    while meeting.state in (GATHERING, COMPLETE):
        if wait_until(meeting.changed, layer.mutex, end) != 0:
            if meeting.state == GATHERING:
                _end(layer, meeting, LEFT_TO_PYTHON)
            end += layer.patience  # all have come: the exchange with other processes has a limit of its own
    layer.waited += now(MONOTONIC) - began


@compiled(types.boolean(_Layer, _i64, _i64, _i64, _i64))
def _meet(layer, key, device, message, operator):
    number = _find(layer, key)
    if number < 0:
        return False
    meeting = carray(pointer(layer.meetings), NUM_MEETINGS, MEETING)[number]
    if meeting.came >> device & 1:
        return False  # twice: the barrier says so
    values = vector(message, _length(layer, key))
    rows = carray(pointer(meeting.rows), (1 + layer.num_rows, 1 + 2 * layer.channels), np.float64)
    rows[1 + device, : values.size] = values
    meeting.came |= 1 << device
    meeting.num_came += 1
    if meeting.state == GATHERING and meeting.num_came == layer.num_devices:
        _complete(layer, meeting, operator)
    else:
        _wait(layer, meeting)
    met = meeting.state == MET
    if met:
        values[:] = rows[0, : values.size]
    meeting.num_left += 1
    if meeting.num_left == layer.num_devices:
        meeting.state = FREE
    return met


@compiled(types.boolean(_i64, _i64, _i64, _i64, _i64), nogil=True)
def meet(address, key, device, message, operator):
    """Bring a message to the meeting at `key`, and leave with that of all devices and processes in its place.

    Args:
        address: of a RENDEZVOUS.
        key: 2 n + direction for the n-th call.
        device: its number, in the order of their names; below 0 for one that is not known.
        message: address of (1 + 2 C,) float64, a shard's moments; or (2 C,), two sums.
        operator: what Python finds the layer by where it has to exchange with other processes.

    Returns:
        Whether all came; if not, the message is as it was, and Python has to meet them.
    """
    layer = rendezvous_at(address)
    pthread_mutex_lock(layer.mutex)
    met = device >= 0 and layer.is_open != 0 and layer.devices >> device & 1 != 0
    if met:
        met = _meet(layer, key, device, message, operator)
    pthread_mutex_unlock(layer.mutex)
    return met


@compiled(_i64(_i64, _i64))
def next_call(address, calls):
    """The number of a device's next call, counted at that address, where several threads may come at once."""
    layer = rendezvous_at(address)
    pthread_mutex_lock(layer.mutex)
    counted = carray(pointer(calls), 1, np.int64)
    counted[0] += 1
    call = counted[0] - 1
    pthread_mutex_unlock(layer.mutex)
    return call


@compiled(types.void(_i64, _i64, _i64))
def add_spent(address, nanoseconds, processor):
    """A pass has taken so long."""
    layer = rendezvous_at(address)
    pthread_mutex_lock(layer.mutex)
    layer.in_callbacks += nanoseconds
    layer.processor += processor
    pthread_mutex_unlock(layer.mutex)
