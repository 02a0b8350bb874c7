"""How the devices of one layer meet without Python's lock, as long as nothing goes wrong.

A meeting takes a block of memory: a row for the result, and one for each device's vector. Whoever comes last combines
the rows in the devices' order, and wakes the others. What takes longer than a moment, and all that is not as it should
be, is left to Python: the block is marked, and everyone who was or comes there goes on to the layer's `Barrier`, which
knows about limits, names and failures.
"""

# mypy: ignore-errors
# Numba reads these functions, Python never runs them.

import numpy as np
from numba import carray, types

from ..kvstore.atoms import WORD, add, call, compiled, exchange_if, get, pointer, put, system_call

# Of the process, once: addresses of C functions, the number of a system call, and how long a moment is.
SYSCALL, FUTEX, YIELD, CLOCK, GET_DATA, FREE, EXCHANGE, MEET, FAIL, SECONDS, NANOSECONDS, NUM_LIBRARY_WORDS = range(12)
# Of a layer: whether its barrier is open; how many devices take part, and which (a bit each, in the order of their
# names); whether other processes do; where its blocks are; nanoseconds that devices have spent, for whoever measures.
OPEN, NUM_DEVICES, DEVICES, PROCESSES, LOCK, BLOCKS, BLOCK_BYTES, NUM_ROWS, CHANNELS = range(9)
KERNELS, WAITED, EXCHANGED, CALLBACKS, NUM_LAYER_WORDS = range(9, 14)
# Of a block: its meeting; who came (a bit each), how many have brought their vector, how many have left again; a word
# to sleep on. The rows follow.
KEY, STATE, CAME, READY, LEFT, BELL, NUM_BLOCK_WORDS = range(7)

NUM_BLOCKS = 16  # meetings at a time; more are left to Python
FREE_BLOCK, OVER = -1, -2  # instead of a key: nobody is there; nobody comes any more
FORWARD, BACKWARD = range(2)  # the key of call n: 2 n + direction
_GATHERING, _FULL, _DONE, _LEFT_TO_PYTHON = range(4)
_WAIT, _WAKE, _EVERYONE = 0, 1, 1 << 30
_MONOTONIC = 1
_PATIENCE = 200  # looks, a microsecond, before one who waits sleeps

_i64 = types.int64


@compiled(_i64(_i64, _i64))
def now(library, at):
    """Nanoseconds of a clock; two words `at` that address are overwritten."""
    call(get(library, CLOCK), _MONOTONIC, at, 0)
    return get(at, 0) * 1_000_000_000 + get(at, 1)


@compiled(types.boolean(_i64, _i64))
def _left_behind(layer, block):
    """Whether a meeting that is left to Python has nobody in it any more, and others may never come this way.

    Where all have come, whoever leaves last frees the block, and may be about to.
    """
    num, came = 0, get(block, CAME)
    while came:
        num, came = num + (came & 1), came >> 1
    empty = get(block, READY) == num and get(block, LEFT) == num
    return get(block, STATE) == _LEFT_TO_PYTHON and empty and num < get(layer, NUM_DEVICES)


@compiled(_i64(_i64, _i64, _i64, _i64))
def _come(library, layer, key, bit):
    """The block of the meeting at `key`, on which this device is noted; 0 if there is no place for it."""
    looks = 0
    while not exchange_if(layer + LOCK * WORD, 0, 1):
        looks += 1
        if looks % _PATIENCE == 0:
            call(get(library, YIELD), 0, 0, 0)
    found, free, left_behind = 0, 0, 0
    for number in range(NUM_BLOCKS):
        block = get(layer, BLOCKS) + number * get(layer, BLOCK_BYTES)
        if get(block, KEY) == key:
            found = block
        elif get(block, KEY) == FREE_BLOCK:
            free = block
        elif _left_behind(layer, block):
            left_behind = block
    if free == 0:
        free = left_behind
    if found == 0 and free != 0:
        for word in (STATE, CAME, READY, LEFT):
            put(free, word, 0)
        put(free, KEY, key)
        found = free
    if found != 0:
        if get(found, CAME) & bit:
            found = 0  # twice: the barrier says so
        else:
            put(found, CAME, get(found, CAME) | bit)
    put(layer, LOCK, 0)
    return found


@compiled(_i64(_i64, _i64, _i64))
def _row(layer, block, number):
    """Where row `number` is; 0 is the result."""
    return block + (NUM_BLOCK_WORDS + number * (1 + 2 * get(layer, CHANNELS))) * WORD


@compiled(types.void(_i64, _i64))
def _combine_moments(layer, block):
    """The result is the moments of all rows together; see :func:`gluon_parallel.moments.combine`."""
    channels, came = get(layer, CHANNELS), get(block, CAME)
    length = 1 + 2 * channels
    result = carray(pointer(_row(layer, block, 0)), length, np.float64)
    count, origin = 0.0, -1
    for number in range(get(layer, NUM_ROWS)):
        if came >> number & 1:
            row = carray(pointer(_row(layer, block, 1 + number)), length, np.float64)
            count += row[0]
            if origin < 0 and row[0] > 0:
                origin = number
    result[:] = 0.0
    if origin < 0:
        return
    first = carray(pointer(_row(layer, block, 1 + origin)), length, np.float64)
    result[0] = count
    for number in range(get(layer, NUM_ROWS)):
        if came >> number & 1:
            row = carray(pointer(_row(layer, block, 1 + number)), length, np.float64)
            for c in range(1, 1 + channels):
                result[c] += row[0] * (row[c] - first[c])
    for c in range(1, 1 + channels):
        result[c] = first[c] + result[c] / count
    for number in range(get(layer, NUM_ROWS)):
        if came >> number & 1:
            row = carray(pointer(_row(layer, block, 1 + number)), length, np.float64)
            if row[0] > 0:
                for c in range(1, 1 + channels):
                    d = row[c] - result[c]
                    result[channels + c] += row[channels + c] + row[0] * (d * d)


@compiled(types.void(_i64, _i64))
def _combine_sums(layer, block):
    """The result is the sum of all rows."""
    length = 2 * get(layer, CHANNELS)
    result = carray(pointer(_row(layer, block, 0)), length, np.float64)
    result[:] = 0.0
    for number in range(get(layer, NUM_ROWS)):
        if get(block, CAME) >> number & 1:
            row = carray(pointer(_row(layer, block, 1 + number)), length, np.float64)
            for i in range(length):
                result[i] += row[i]


@compiled(types.void(_i64, _i64, _i64))
def _end(library, block, state):
    put(block, STATE, state)
    add(block + BELL * WORD, 1)
    system_call(get(library, SYSCALL), get(library, FUTEX), block + BELL * WORD, _WAKE, _EVERYONE, 0)


@compiled(types.void(_i64, _i64, _i64))
def _wait(library, block, clock):
    """Until the meeting has ended, or a moment has passed and someone is still missing."""
    for _ in range(_PATIENCE):
        if get(block, STATE) >= _DONE:
            return
    moment = get(library, SECONDS) * 1_000_000_000 + get(library, NANOSECONDS)
    end = now(library, clock) + moment
    while True:
        bell = get(block, BELL)
        if get(block, STATE) >= _DONE:
            return
        word, limit = block + BELL * WORD, library + SECONDS * WORD
        system_call(get(library, SYSCALL), get(library, FUTEX), word, _WAIT, bell & 0xFFFFFFFF, limit)
        if now(library, clock) >= end and exchange_if(block + STATE * WORD, _GATHERING, _LEFT_TO_PYTHON):
            _end(library, block, _LEFT_TO_PYTHON)
            return


@compiled(types.boolean(_i64, _i64, _i64, _i64, _i64, _i64, _i64), nogil=True)
def meet(library, layer, key, number, vector, clock, operator):
    """Bring the values at `vector` to the meeting at `key`, and leave with the result in their place.

    Args:
        library, layer: addresses of records.
        key: 2 n + direction for the n-th call.
        number: of this device, in the order of their names; below 0 for one that is not known.
        vector: address of 1 + 2 C numbers (forward) or 2 C (backward).
        clock: address of two words that may be overwritten.
        operator: what EXCHANGE is told to find its layer by.

    Returns:
        Whether all came; if not, nothing has changed, and Python has to meet them.
    """
    if number < 0 or not get(layer, OPEN) or not get(layer, DEVICES) >> number & 1:
        return False
    block = _come(library, layer, key, 1 << number)
    if block == 0:
        return False
    length = 2 * get(layer, CHANNELS) + (1 if key % 2 == FORWARD else 0)
    values = carray(pointer(vector), length, np.float64)
    carray(pointer(_row(layer, block, 1 + number)), length, np.float64)[:] = values
    last = add(block + READY * WORD, 1) + 1 == get(layer, NUM_DEVICES)
    if last and exchange_if(block + STATE * WORD, _GATHERING, _FULL):
        if key % 2 == FORWARD:
            _combine_moments(layer, block)
        else:
            _combine_sums(layer, block)
        state = _DONE
        if get(layer, PROCESSES):
            began = now(library, clock)
            if call(get(library, EXCHANGE), operator, key, _row(layer, block, 0)) != 0:
                state = _LEFT_TO_PYTHON  # where the barrier is closed by now
            add(layer + EXCHANGED * WORD, now(library, clock) - began)
        if state == _DONE:
            put(block, KEY, OVER)
        _end(library, block, state)
    elif not last:
        began = now(library, clock)
        _wait(library, block, clock)
        add(layer + WAITED * WORD, now(library, clock) - began)
    done = get(block, STATE) == _DONE
    if done:
        values[:] = carray(pointer(_row(layer, block, 0)), length, np.float64)
    if add(block + LEFT * WORD, 1) + 1 == get(layer, NUM_DEVICES):
        put(block, KEY, FREE_BLOCK)
    return done
