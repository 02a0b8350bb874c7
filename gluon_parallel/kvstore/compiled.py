"""Sums over the processes of one host through shared memory, compiled: the engine runs them without Python's lock.

Every key has a row of shared memory per process. A process copies its gradient into its row and says that it has
arrived; whoever finds that all have arrived adds the rows up in rank order, into its own array. So all processes get
the same bits, nothing is sent, and the one who comes last waits for nobody. Those who came earlier are finished by
their driver, a thread that sleeps until another process rings.

All of it is 64-bit words at addresses; the names below say which word of a record is what.
"""

# mypy: ignore-errors
# Numba reads these functions, Python never runs them.

import numba
import numpy as np
from numba import carray, types

from .atoms import WORD, add, address, call, compiled, exchange_if, get, load, pointer, put, store, system_call

LINE = 64  # bytes; no two processes write to one line of the cache

# Shared, a line per process at the beginning of the memory.
BELL, SLEEPS, BEAT = range(3)  # counted up to wake its driver; whether that sleeps; how often the process has arrived
# Shared, a line per process before the rows of each key; numbers of exchanges.
ARRIVED, LEFT, HELD = range(3)  # its row is written; it has read all rows; it waits for the others to have read theirs
KEY_BELL, KEY_SLEEPS = 3, 4  # as above, for a thread that waits for this key alone

# Of this process, once. FAILED is 0, or the address of the engine's exception with which all exchanges end.
SIZE, RANK, LINES, FAILED, STOPPED, NUM_EXCHANGES, EXCHANGES = range(7)
SYSCALL, FUTEX, TO_DLPACK, FREE_DLPACK, SECONDS, NANOSECONDS, NUM_GROUP_WORDS = range(7, 14)
# Of this process, per key; the addresses of its rows follow. TURN is the exchange to come next, 0 before all agreed.
KEY_LINES, NUM_VALUES, DTYPE, DEPTH, TURN, NUM_QUEUED, ROWS = range(7)
# Of this process, per exchange; the handles of its arrays follow, and then their addresses.
STATE, GROUP, KEY, NUMBER, NUM_READ, NUM_WRITTEN, DONE, ENGINE, PARAMETER, PROBLEM, HANDLES = range(11)

# An exchange is not under way; handed to the engine; before its turn; before its row is free; before all have arrived;
# in the hands of one thread.
IDLE, PUSHED, QUEUED, HOLDING, WAITING, BUSY = range(6)

DTYPES = ("float32", "float64", "int32")
_BLOCK = 8192  # values of a sum that stay in the cache
_WAIT, _WAKE = 0, 1  # of futex(2)
_PATIENCE = 200  # looks, some microseconds, before one who waits sleeps; on few cores it must not take longer

_i64 = types.int64


def _sum_of(name):
    """A function: the array at `out` becomes the sum of `num` others, whose addresses stand from `sources` on."""
    dtype = getattr(np, name)

    def function(sources, num, out, size):
        target = carray(pointer(out), size, dtype)
        for begin in range(0, size, _BLOCK):
            end = min(begin + _BLOCK, size)
            block = target[begin:end]
            first = carray(pointer(load(sources)), size, dtype)[begin:end]
            if num == 1:
                for i in range(block.size):
                    block[i] = first[i]
                continue
            second = carray(pointer(load(sources + WORD)), size, dtype)[begin:end]
            for i in range(block.size):
                block[i] = first[i] + second[i]
            for number in range(2, num):
                other = carray(pointer(load(sources + number * WORD)), size, dtype)[begin:end]
                for i in range(block.size):
                    block[i] += other[i]

    # A name of its own: Numba keeps compiled code by name, and links what another process compiled meanwhile by it.
    function.__name__ = function.__qualname__ = f"_sum_{name}"
    return compiled(types.void(_i64, _i64, _i64, _i64))(function)


_sum_float32, _sum_float64, _sum_int32 = map(_sum_of, DTYPES)


@compiled(types.void(_i64, _i64, _i64, _i64, _i64))
def _sum(dtype, sources, num, out, size):
    if dtype == 0:
        _sum_float32(sources, num, out, size)
    elif dtype == 1:
        _sum_float64(sources, num, out, size)
    else:
        _sum_int32(sources, num, out, size)


@compiled(types.void(_i64, _i64, _i64))
def _spoil(dtype, out, size):
    """Nobody must train on with half a sum: NaN, or 0 where there is no NaN."""
    if dtype == 0:
        carray(pointer(out), size, np.float32)[:] = np.nan
    elif dtype == 1:
        carray(pointer(out), size, np.float64)[:] = np.nan
    else:
        carray(pointer(out), size, np.int32)[:] = 0


@compiled(types.void(_i64, _i64, _i64, _i64))
def _ring(group, line, bell, sleeps):
    add(line + bell * WORD, 1)
    if get(line, sleeps):
        system_call(get(group, SYSCALL), get(group, FUTEX), line + bell * WORD, _WAKE, 1, 0)


@compiled(types.void(_i64, _i64))
def ring(group, rank):
    """Wake the driver of the process `rank`, which has something to look at."""
    _ring(group, get(group, LINES) + rank * LINE, BELL, SLEEPS)


@compiled(types.boolean(_i64, _i64, _i64, _i64))
def _all_at(group, lines, which, number):
    """Whether every process's word `which` at this key is at least `number`."""
    for rank in range(get(group, SIZE)):
        if get(lines + rank * LINE, which) < number:
            return False
    return True


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
        return _all_at(group, lines, LEFT, number - get(key, DEPTH))
    return _all_at(group, lines, ARRIVED, number)


@compiled(types.void(_i64))
def _arrive(exchange):
    """Sum this process's devices into its row."""
    group, key, number = get(exchange, GROUP), get(exchange, KEY), get(exchange, NUMBER)
    lines, size, rank = get(key, KEY_LINES), get(group, SIZE), get(group, RANK)
    sources = exchange + (HANDLES + get(exchange, NUM_READ) + get(exchange, NUM_WRITTEN)) * WORD
    row = get(key, ROWS + number % get(key, DEPTH) * size + rank)
    _sum(get(key, DTYPE), sources, get(exchange, NUM_READ), row, get(key, NUM_VALUES))
    put(lines + rank * LINE, ARRIVED, number)
    add(get(group, LINES) + rank * LINE + BEAT * WORD, 1)
    if _all_at(group, lines, ARRIVED, number):
        for other in range(size):
            if other != rank:
                ring(group, other)


@compiled(types.void(_i64))
def _leave(exchange):
    """All have arrived: the rows' sum goes to this process's devices."""
    group, key, number = get(exchange, GROUP), get(exchange, KEY), get(exchange, NUMBER)
    lines, size, rank, depth = get(key, KEY_LINES), get(group, SIZE), get(group, RANK), get(key, DEPTH)
    num_read, num_written, num_values = get(exchange, NUM_READ), get(exchange, NUM_WRITTEN), get(key, NUM_VALUES)
    outs = exchange + (HANDLES + 2 * num_read + num_written) * WORD
    rows = key + (ROWS + number % depth * size) * WORD
    _sum(get(key, DTYPE), rows, size, get(outs, 0), num_values)
    for copy in range(1, num_written):
        _sum(get(key, DTYPE), outs, 1, get(outs, copy), num_values)
    put(lines + rank * LINE, LEFT, number)
    for other in range(size):
        if other != rank and get(lines + other * LINE, HELD) == number + depth:
            ring(group, other)
    put(key, TURN, number + 1)


@compiled(types.void(_i64))
def _give_up(exchange):
    if get(exchange, PROBLEM) == 0:
        key, num_written = get(exchange, KEY), get(exchange, NUM_WRITTEN)
        outs = exchange + (HANDLES + 2 * get(exchange, NUM_READ) + num_written) * WORD
        for copy in range(num_written):
            _spoil(get(key, DTYPE), get(outs, copy), get(key, NUM_VALUES))


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
            system_call(get(group, SYSCALL), get(group, FUTEX), line + BELL * WORD, _WAIT, bell & 0xFFFFFFFF, 0)
        put(line, SLEEPS, 0)
        bell = get(line, BELL)


@compiled(types.boolean(_i64, _i64, _i64))
def _everyone_came(group, key, number):
    """Wait, no longer than the group says, until all have arrived; whether they have."""
    lines = get(key, KEY_LINES)
    line = lines + get(group, RANK) * LINE
    for _ in range(_PATIENCE):
        if _all_at(group, lines, ARRIVED, number):
            return True
    bell = get(line, KEY_BELL)
    put(line, KEY_SLEEPS, 1)
    if not _all_at(group, lines, ARRIVED, number):
        word, limit = line + KEY_BELL * WORD, group + SECONDS * WORD
        system_call(get(group, SYSCALL), get(group, FUTEX), word, _WAIT, bell & 0xFFFFFFFF, limit)
    put(line, KEY_SLEEPS, 0)
    return _all_at(group, lines, ARRIVED, number)


@compiled(types.boolean(_i64, _i64, _i64, _i64, _i64), nogil=True)
def gather(group, key, number, vector, out):
    """All rows go to `out`, this process's being `vector`, or 0 if it is there already; whether all have arrived."""
    lines, size, rank = get(key, KEY_LINES), get(group, SIZE), get(group, RANK)
    num_values = get(key, NUM_VALUES)
    rows = key + (ROWS + number % 2 * size) * WORD  # who arrives has left the meeting before last: two rows do
    if vector != 0:
        target = carray(pointer(get(rows, rank)), num_values, np.uint8)
        target[:] = carray(pointer(vector), num_values, np.uint8)
        put(lines + rank * LINE, ARRIVED, number)
        add(get(group, LINES) + rank * LINE + BEAT * WORD, 1)
        if _all_at(group, lines, ARRIVED, number):
            for other in range(size):
                if other != rank:
                    _ring(group, lines + other * LINE, KEY_BELL, KEY_SLEEPS)
    if not _everyone_came(group, key, number):
        return False
    for other in range(size):
        target = carray(pointer(out + other * num_values), num_values, np.uint8)
        target[:] = carray(pointer(get(rows, other)), num_values, np.uint8)
    put(lines + rank * LINE, LEFT, number)
    return True


@compiled(types.void(types.voidptr, types.voidptr, types.voidptr), make=numba.cfunc)
def begin(_run_context, on_complete, parameter):
    """What the engine calls when an exchange's arrays are ready."""
    exchange, waiting = address(parameter), address(on_complete)
    group = get(exchange, GROUP)
    for word in range(3):
        put(exchange, DONE + word, get(waiting, word))
    num = get(exchange, NUM_READ) + get(exchange, NUM_WRITTEN)
    problem = 0
    for number in range(num):
        slot = exchange + (HANDLES + num + number) * WORD
        if call(get(group, TO_DLPACK), get(exchange, HANDLES + number), slot, 0) != 0:
            problem = 1  # it lies in oneDNN's layout; to ask for its memory would mean to wait for it
            continue
        tensor = get(slot, 0)
        store(slot, load(tensor) + load(tensor + 40))  # DLTensor: where the data is, and its offset
        call(get(group, FREE_DLPACK), tensor, 0, 0)
    put(exchange, PROBLEM, problem)
    add(get(exchange, KEY) + NUM_QUEUED * WORD, 1)
    put(exchange, STATE, QUEUED)
    while exchange != 0:
        exchange = _move(exchange)
