"""Compiled driver of sums through shared memory: the engine and a thread run it without Python's lock.

Every key has a row of shared memory per process. A process copies its gradient into its row and says that it has
arrived; whoever finds that all have arrived adds the rows up in rank order, into its own array. So all processes get
the same bits, nothing is sent, and the one who comes last waits for nobody. Those who came earlier are finished by
their driver, a thread that sleeps until another process rings.
"""

import numba
from numba import types

from ....engine.atomics import WORD, add, address, call, compiled, exchange_if, get, load, mxnet_function, put, store
from ...flight_recorder import compiled_record as recorder
from .compiled_sum import spoil, sum_arrays
from .compiled_waiting import all_at, ring, wait_for_bell

from .layout import (  # isort: skip
    ARRIVED, BEAT, BELL, BUSY, DEPTH, DONE, DTYPE, ENGINE, EXCHANGES, FAILED, GROUP, HANDLES, HELD,
    HOLDING, IDLE, KEY, KEY_LINES, KEY_NAME, LEFT, LINE, LINES, NUM_EXCHANGES, NUM_QUEUED, NUM_READ, NUM_VALUES,
    NUM_WRITTEN, NUMBER, PARAMETER, PROBLEM, QUEUED, RANK, RECORD, RECORDER, ROWS, SIZE, SLEEPS, STATE, STOPPED,
    TURN, WAITING,
)  # fmt: skip

_i64 = types.int64
_to_dlpack = mxnet_function("MXNDArrayToDLPack", 2)
_free_dlpack = mxnet_function("MXNDArrayCallDLPackDeleter", 1)


@compiled(types.void(_i64, _i64))
def wake(group, rank):
    """Wake the driver of the process `rank`, which has something to look at."""
    ring(get(group, LINES) + rank * LINE, BELL, SLEEPS)


@compiled(types.boolean(_i64, _i64))
def _can_move(exchange, state):
    """Whether the exchange has no reason to stay in `state`."""
    group, key, number = get(exchange, GROUP), get(exchange, KEY), get(exchange, NUMBER)
    if get(group, FAILED):
        return True
    if state == QUEUED:
        return get(key, TURN) == number
    if get(exchange, PROBLEM):
        return False  # until Python has seen it
    lines = get(key, KEY_LINES)
    if state == HOLDING:
        return all_at(group, lines, LEFT, number - get(key, DEPTH))
    return all_at(group, lines, ARRIVED, number)


@compiled(types.void(_i64))
def _arrive(exchange):
    """Sum this process's devices into its row."""
    group, key, number = get(exchange, GROUP), get(exchange, KEY), get(exchange, NUMBER)
    lines, size, rank = get(key, KEY_LINES), get(group, SIZE), get(group, RANK)
    sources = exchange + (HANDLES + get(exchange, NUM_READ) + get(exchange, NUM_WRITTEN)) * WORD
    row = get(key, ROWS + number % get(key, DEPTH) * size + rank)
    sum_arrays(get(key, DTYPE), sources, get(exchange, NUM_READ), row, get(key, NUM_VALUES))
    put(lines + rank * LINE, ARRIVED, number)
    add(get(group, LINES) + rank * LINE + BEAT * WORD, 1)
    if all_at(group, lines, ARRIVED, number):
        for other in range(size):
            if other != rank:
                wake(group, other)


@compiled(types.void(_i64))
def _leave(exchange):
    """All have arrived: the rows' sum goes to this process's devices."""
    group, key, number = get(exchange, GROUP), get(exchange, KEY), get(exchange, NUMBER)
    lines, size, rank, depth = get(key, KEY_LINES), get(group, SIZE), get(group, RANK), get(key, DEPTH)
    num_read, num_written, num_values = get(exchange, NUM_READ), get(exchange, NUM_WRITTEN), get(key, NUM_VALUES)
    outs = exchange + (HANDLES + 2 * num_read + num_written) * WORD
    rows = key + (ROWS + number % depth * size) * WORD
    sum_arrays(get(key, DTYPE), rows, size, get(outs, 0), num_values)
    for copy in range(1, num_written):
        sum_arrays(get(key, DTYPE), outs, 1, get(outs, copy), num_values)
    put(lines + rank * LINE, LEFT, number)
    for other in range(size):
        if other != rank and get(lines + other * LINE, HELD) == number + depth:
            wake(group, other)
    put(key, TURN, number + 1)
    recorder.end(get(group, RECORDER), get(exchange, RECORD), True)


@compiled(types.void(_i64))
def _give_up(exchange):
    if get(exchange, PROBLEM) == 0:
        key, num_written = get(exchange, KEY), get(exchange, NUM_WRITTEN)
        outs = exchange + (HANDLES + 2 * get(exchange, NUM_READ) + num_written) * WORD
        for copy in range(num_written):
            spoil(get(key, DTYPE), get(outs, copy), get(key, NUM_VALUES))


@compiled(_i64(_i64))
def _move(exchange):
    """Take an exchange as far as it can go now; returns the one that can go on because this one has ended, or 0."""
    while True:
        state = get(exchange, STATE)
        if state < QUEUED or state == BUSY or not exchange_if(exchange + STATE * WORD, state, BUSY):
            return 0  # it does not wait, or somebody else has it
        group, key = get(exchange, GROUP), get(exchange, KEY)
        ended, error = False, 0
        while not ended and _can_move(exchange, state):  # again, now that nobody else can have moved it
            if get(group, FAILED):
                _give_up(exchange)
                ended, error = True, get(group, FAILED)
            elif state == QUEUED:
                add(key + NUM_QUEUED * WORD, -1)
                put(get(key, KEY_LINES) + get(group, RANK) * LINE, HELD, get(exchange, NUMBER))
                state = HOLDING
            elif state == HOLDING:
                _arrive(exchange)
                state = WAITING
            else:
                _leave(exchange)
                ended = True
        if ended:
            following = get(exchange, NUMBER) + 1
            done, engine, parameter = get(exchange, DONE), get(exchange, ENGINE), get(exchange, PARAMETER)
            put(exchange, STATE, IDLE)  # from here on it may be used anew
            call(done, engine, parameter, error)
            if get(key, NUM_QUEUED) > 0:
                for number in range(get(group, NUM_EXCHANGES)):
                    other = get(get(group, EXCHANGES), number)
                    if get(other, KEY) == key and get(other, NUMBER) == following:
                        return other
            return 0
        put(exchange, STATE, state)
        if not _can_move(exchange, state):
            return 0  # whoever changes that from now on rings, and finds the exchange in this state


@compiled(types.void(_i64))
def look(group):
    """Move all exchanges of this process."""
    for number in range(get(group, NUM_EXCHANGES)):
        exchange = get(get(group, EXCHANGES), number)
        while exchange != 0:
            exchange = _move(exchange)


@compiled(types.void(_i64), nogil=True)
def drive(group):
    """Move exchanges whenever another process rings, until this one is stopped."""
    line = get(group, LINES) + get(group, RANK) * LINE
    bell = get(line, BELL)  # read before the word that stops it is: whoever stops it says so first, and then rings
    while not get(group, STOPPED):
        look(group)
        put(line, SLEEPS, 1)
        if get(line, BELL) == bell:
            wait_for_bell(line + BELL * WORD, bell, 0)
        put(line, SLEEPS, 0)
        bell = get(line, BELL)


@compiled(types.void(types.voidptr, types.voidptr, types.voidptr), make=numba.cfunc)
def begin(_run_context, on_complete, parameter):
    """What the engine calls when an exchange's arrays are ready."""
    exchange, waiting = address(parameter), address(on_complete)
    group, key = get(exchange, GROUP), get(exchange, KEY)
    size = get(key, NUM_VALUES) * (WORD if get(key, DTYPE) == 1 else WORD // 2)
    put(exchange, RECORD, recorder.begin(get(group, RECORDER), get(key, KEY_NAME), get(exchange, NUMBER), size))
    for word in range(3):
        put(exchange, DONE + word, get(waiting, word))
    num = get(exchange, NUM_READ) + get(exchange, NUM_WRITTEN)
    problem = 0
    for number in range(num):
        slot = exchange + (HANDLES + num + number) * WORD
        if _to_dlpack(get(exchange, HANDLES + number), slot) != 0:
            problem = 1  # it lies in oneDNN's layout; to ask for its memory would mean to wait for it
            continue
        tensor = get(slot, 0)
        store(slot, load(tensor) + load(tensor + 40))  # DLTensor: where the data is, and its offset
        _free_dlpack(tensor)
    put(exchange, PROBLEM, problem)
    add(key + NUM_QUEUED * WORD, 1)
    put(exchange, STATE, QUEUED)
    while exchange != 0:
        exchange = _move(exchange)
