"""Compiled driver of sums through shared memory: the engine and a thread run it without Python's lock.

Every key has a row of shared memory per process. A process copies its gradient into its row and says that it has
arrived; whoever finds that all have arrived adds the rows up in rank order, into its own array. So all processes get
the same bits, nothing is sent, and the last process waits for none. Those that came earlier are finished by
their driver, a thread that sleeps until another process rings. Where there are several hosts, the first process of each
adds up its rows and has MPI sum over the hosts; the others read the result.

Where values have owners, on one host, each process copies its gradient into its row and adds up what it owns; or it
copies what it owns into its row, and what others own from theirs.
"""

import ctypes

from numba import types

from ....engine.compiled.functions import (
    c_callback,
    c_function,
    call,
    compiled,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from ....engine.compiled.records import Record
from ....engine.functions import OnComplete
from ...flight_recorder import compiled_record as recorder
from .compiled_sum import copy_part, release, spoil, sum_arrays, sum_parts
from .compiled_waiting import all_arrived, all_left, group_at, key_at, line_at, ring, wait_for_bell
from .layout import BUSY, HOLDING, IDLE, LINE, QUEUED, SUMMING, WAITING, Exchange, Segment

from ....engine.compiled.access import (  # isort: skip
    WORD, add, address, address_of_field, exchange_if, load, record_at, record_type, store, words,
)  # fmt: skip


class _DLTensor(Record):
    """DLPack's description of an array."""

    data: int  # address
    device: int
    num_axes_and_dtype: int
    shape: int
    strides: int
    byte_offset: int


_i64, _Exchange, _SEGMENT = types.int64, record_type(Exchange), ctypes.sizeof(Segment)
_exchange_at, _segment_at, _on_complete_at, _tensor_at = map(record_at, (Exchange, Segment, OnComplete, _DLTensor))
_to_dlpack = c_function("MXNDArrayToDLPack", 2)
_free_dlpack = c_function("MXNDArrayCallDLPackDeleter", 1)


@compiled(types.void(_i64, _i64), called_from_python=True)
def wake(group, rank):
    """Wake the driver of the process `rank`, which has something to look at."""
    ring(line_at(group_at(group).lines + rank * LINE))


@compiled(types.boolean(_Exchange, _i64))
def _can_move(exchange, state):
    """Whether the exchange has no reason to stay in `state`."""
    group, key, number = group_at(exchange.group), key_at(exchange.key), exchange.number
    if load(group, "failed"):
        return True
    if state == QUEUED:
        return load(key, "turn") == number
    if exchange.problem:
        return False  # until Python has seen it
    if state == HOLDING:
        return all_left(group, key, number - key.depth)
    if state == SUMMING or (group.num_hosts > 1 and group.rank != 0):
        return load(line_at(key.lines), "summed") >= number
    return all_arrived(group, key, number)


@compiled(types.void(_i64))
def _wake_others(group):
    """Wake the drivers of all other processes of this host."""
    for other in range(group_at(group).size):
        if other != group_at(group).rank:
            wake(group, other)


@compiled(types.void(_Exchange))
def _arrive(exchange):
    """Sum this process's devices into its row."""
    group, key, number = group_at(exchange.group), key_at(exchange.key), exchange.number
    row = words(key.rows, key.depth * group.size)[number % key.depth * group.size + group.rank]
    num_devices = exchange.num_read // exchange.num_segments
    for place in range(exchange.num_segments):
        segment = _segment_at(exchange.segments + place * _SEGMENT)
        sources, part_of_row = exchange.arrays + place * num_devices * WORD, row + segment.offset
        if segment.bounds == 0:
            sum_arrays(key.dtype, sources, num_devices, part_of_row, segment.num_values)
            continue
        bounds = words(segment.bounds, group.size + 1)
        own_begin, own_end = bounds[group.rank], bounds[group.rank + 1]
        if exchange.gathers:
            copy_part(key.dtype, words(sources, 1)[0], part_of_row, own_begin, own_end)
            continue
        sum_parts(key.dtype, sources, 0, num_devices, part_of_row, bounds[0], bounds[group.size])
        for array in words(sources, num_devices * exchange.releases):
            release(key.dtype, array, bounds[0], own_begin)
            release(key.dtype, array, own_end, bounds[group.size])
    store(line_at(key.lines + group.rank * LINE), "arrived", number)
    add(line_at(group.lines + group.rank * LINE), "beat", 1)
    if all_arrived(group, key, number):
        if group.num_hosts == 1:
            _wake_others(exchange.group)
        elif group.rank != 0:
            wake(exchange.group, 0)


@compiled(types.void(_Exchange))
def _sum_over_hosts(exchange):
    """All of this host have arrived: add their rows up in this process's, and have MPI sum over the hosts."""
    group, key = group_at(exchange.group), key_at(exchange.key)
    if group.size > 1:
        sum_arrays(key.dtype, key.rows, group.size, words(key.rows, 1)[0], key.num_values)
    call(group.start, key.number, exchange.number, 0)


@compiled(types.void(_Exchange))
def _leave(exchange):
    """All have arrived: the rows' sum goes to this process's devices."""
    group, key, number = group_at(exchange.group), key_at(exchange.key), exchange.number
    num_devices = exchange.num_written // exchange.num_segments
    sources = key.rows + number % key.depth * group.size * WORD
    for place in range(exchange.num_segments):
        first = exchange.arrays + (exchange.num_read + place * num_devices) * WORD
        outs, segment = words(first, num_devices), _segment_at(exchange.segments + place * _SEGMENT)
        begin, end = 0, segment.num_values
        if segment.bounds != 0:
            bounds = words(segment.bounds, group.size + 1)
            begin, end = bounds[0], bounds[group.size]
            if exchange.gathers:
                for other in range(group.size):
                    if other != group.rank:
                        source = words(sources, group.size)[other] + segment.offset
                        copy_part(key.dtype, source, outs[0], bounds[other], bounds[other + 1])
            else:
                begin, end = bounds[group.rank], bounds[group.rank + 1]
                sum_parts(key.dtype, sources, segment.offset, group.size, outs[0], begin, end)
        elif group.num_hosts == 1:  # one array
            sum_arrays(key.dtype, sources, group.size, outs[0], segment.num_values)
        else:
            sum_arrays(key.dtype, address_of_field(segment, "result"), 1, outs[0], segment.num_values)
        for copy in range(1, num_devices):
            copy_part(key.dtype, outs[0], outs[copy], begin, end)
    store(line_at(key.lines + group.rank * LINE), "left", number)
    for other in range(group.size):
        if other != group.rank and load(line_at(key.lines + other * LINE), "held") == number + key.depth:
            wake(exchange.group, other)
    store(key, "turn", number + 1)
    recorder.end(group.recorder, exchange.record, True)


@compiled(types.void(_Exchange))
def _give_up(exchange):
    """Leave no half sums in the exchange's arrays."""
    if exchange.problem == 0:
        key, num_written = key_at(exchange.key), exchange.num_written
        outs = words(exchange.arrays + exchange.num_read * WORD, num_written)
        for copy in range(num_written):
            place = copy // (num_written // exchange.num_segments)
            segment = _segment_at(exchange.segments + place * _SEGMENT)
            spoil(key.dtype, outs[copy], segment.num_values)


@compiled(_i64(_i64))
def _move(exchange_address):
    """Take an exchange as far as it can go now; returns the one that can go on because this one has ended, or 0."""
    exchange = _exchange_at(exchange_address)
    while True:
        state = load(exchange, "state")
        if state < QUEUED or state == BUSY or not exchange_if(exchange, "state", state, BUSY):
            return 0  # it does not wait, or another thread has it
        group, key = group_at(exchange.group), key_at(exchange.key)
        ended, error = False, 0
        while not ended and _can_move(exchange, state):  # again, now that no other thread can move it
            if load(group, "failed"):
                _give_up(exchange)
                ended, error = True, load(group, "failed")
            elif state == QUEUED:
                add(key, "num_queued", -1)
                store(line_at(key.lines + group.rank * LINE), "held", exchange.number)
                state = HOLDING
            elif state == HOLDING:
                _arrive(exchange)
                state = WAITING
            elif state == WAITING and group.num_hosts > 1 and group.rank == 0:
                _sum_over_hosts(exchange)
                state = SUMMING
            else:
                _leave(exchange)
                ended = True
        if ended:
            following = exchange.number + 1
            callback, engine, param = exchange.callback, exchange.engine, exchange.param
            store(exchange, "state", IDLE)  # from here on it may be used anew
            if error:
                pthread_mutex_lock(group.errors)
            call(callback, engine, param, error)
            if error:
                pthread_mutex_unlock(group.errors)
            if load(key, "num_queued") > 0:
                num = load(group, "num_exchanges")
                for other in words(load(group, "exchanges"), num):
                    if _exchange_at(other).key == address(key) and _exchange_at(other).number == following:
                        return other
            return 0
        store(exchange, "state", state)
        if not _can_move(exchange, state):
            return 0  # whoever changes that from now on rings, and finds the exchange in this state


# Called without Python's lock: it may wait for the mutex `errors`, whose holder may wait for Python's lock.
@compiled(types.void(_i64), called_from_python=True)
def look(group):
    """Move all exchanges of this process."""
    number = 0
    while number < load(group_at(group), "num_exchanges"):
        exchange = words(load(group_at(group), "exchanges"), number + 1)[number]
        while exchange != 0:
            exchange = _move(exchange)
        number += 1


@compiled(types.void(_i64, _i64, _i64), called_from_python=True)
def summed(group, key, number):
    """MPI has summed over the hosts."""
    store(line_at(key_at(key).lines), "summed", number)
    _wake_others(group)
    look(group)


@compiled(types.void(_i64), called_from_python=True)
def drive(address):
    """Move exchanges whenever another process rings, until this one is stopped."""
    group = group_at(address)
    line = line_at(group.lines + group.rank * LINE)
    bell = load(line, "bell")  # read before `stopped` is: that is written first, and then the bell rings
    while not load(group, "stopped"):
        look(address)
        store(line, "sleeps", 1)
        if load(line, "bell") == bell:
            wait_for_bell(line, bell, 0)
        store(line, "sleeps", 0)
        bell = load(line, "bell")


@c_callback(types.void(types.voidptr, types.voidptr, types.voidptr))
def begin(_run_context, on_complete, parameter):
    """What the engine calls when an exchange's arrays are ready."""
    exchange, waiting = _exchange_at(address(parameter)), _on_complete_at(address(on_complete))
    group, key = group_at(exchange.group), key_at(exchange.key)
    exchange.record = recorder.begin(group.recorder, key.name, exchange.number, exchange.num_bytes)
    exchange.callback, exchange.engine, exchange.param = waiting.callback, waiting.engine, waiting.param
    num = exchange.num_read + exchange.num_written
    handles, arrays = words(exchange.handles, num), words(exchange.arrays, num)
    exchange.problem = 0
    for number in range(num):
        if _to_dlpack(handles[number], exchange.arrays + number * WORD) != 0:
            exchange.problem = 1  # it lies in oneDNN's layout; to ask for its memory would mean to wait for it
            continue
        tensor = arrays[number]
        arrays[number] = _tensor_at(tensor).data + _tensor_at(tensor).byte_offset
        _free_dlpack(tensor)
    add(key, "num_queued", 1)
    store(exchange, "state", QUEUED)
    following = address(parameter)
    while following != 0:
        following = _move(following)
