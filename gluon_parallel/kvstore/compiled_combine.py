"""Combine statistics of devices or processes, exactly for shards of any size."""

import numpy as np
from numba import carray, types

from ..engine.compiled.access import pointer, vector
from ..engine.compiled.functions import c_callback, c_function, compiled
from .exchange import HEADER

_i64, _Rows, _Vector = types.int64, types.float64[:, :], types.float64[::1]
_Message = types.CPointer(types.float64)
_FROM_PYTHON = types.void(*[_i64] * 5)
_malloc, _free = c_function("malloc", 1, _i64), c_function("free", 1)
_OPERATION = types.void(_Message, _Message, types.CPointer(types.int32), types.voidptr)


@compiled(types.void(_Rows, _Vector))
def combine_moments(rows, result):
    """Combine rows of moments into `result`.

    Each row, and `result`, is (1 + 2C,): the count, C means, and C sums of squared deviations from the mean. A row of
    count 0 holds finite numbers. The sum of squares is never formed: at a mean of 1e6 and a variance of 1, the variance
    would be the 40th of float64's 53 bits. The mean is computed from offsets from one row's mean, so that rows with
    equal means give exactly this mean.
    """
    channels = (result.size - 1) // 2
    count, origin = 0.0, -1
    for number in range(len(rows)):
        count += rows[number, 0]
        if origin < 0 and rows[number, 0] > 0:
            origin = number
    result[:] = 0.0
    if origin < 0:
        return
    result[0] = count
    for number in range(len(rows)):
        for c in range(1, 1 + channels):
            result[c] += rows[number, 0] * (rows[number, c] - rows[origin, c])
    for c in range(1, 1 + channels):
        result[c] = rows[origin, c] + result[c] / count
    for number in range(len(rows)):
        if rows[number, 0] > 0:
            for c in range(1, 1 + channels):
                d = rows[number, c] - result[c]
                result[channels + c] += rows[number, channels + c] + rows[number, 0] * (d * d)


@compiled(types.void(_Rows, _i64, _Vector))
def combine(rows, direction, result):
    """Combine `rows` into `result`: moments in the forward pass (direction 0), sums in the backward pass (1)."""
    if direction == 0:
        combine_moments(rows, result)
        return
    result[:] = 0.0
    for number in range(len(rows)):
        for i in range(result.size):
            result[i] += rows[number, i]


@compiled(types.void(_Rows, _i64, _Vector))
def combine_messages(rows, direction, result):
    """Combine messages with headers: a sum of counts, and the call's number, or NaN where the numbers differ."""
    combine(rows[:, HEADER:], direction, result[HEADER:])
    result[0], result[1] = 0.0, rows[0, 1]
    for number in range(len(rows)):
        result[0] += rows[number, 0]
        if rows[number, 1] != result[1]:
            result[1] = np.nan


@c_callback(_FROM_PYTHON)
def combine_statistics(rows, num, size, direction, result):
    """:func:`combine` for arrays at addresses: (num, size) and (size,) float64."""
    combine(carray(pointer(rows), (num, size), np.float64), direction, vector(result, size))


@c_callback(_FROM_PYTHON)
def combine_with_headers(rows, num, size, direction, result):
    """:func:`combine_messages` for arrays at addresses: (num, size) and (size,) float64."""
    combine_messages(carray(pointer(rows), (num, size), np.float64), direction, vector(result, size))


@compiled(types.void(_Message, _Message, _i64))
def _combine_two(others, mine, direction):
    length = int(mine[0])
    result, memory = carray(mine, 1 + length)[1:], _malloc(16 * length)
    rows = carray(pointer(memory), (2, length), np.float64)
    rows[0], rows[1] = carray(others, 1 + length)[1:], result
    combine_messages(rows, direction, result)
    _free(memory)


# What MPI calls to combine the messages of two processes. MPI must not split a message, so to MPI it is one value; the
# first number is its length, which MPI does not tell.
@c_callback(_OPERATION)
def moments_operation(others, mine, _number, _type):
    """Combine two messages with moments."""
    _combine_two(others, mine, 0)


@c_callback(_OPERATION)
def sums_operation(others, mine, _number, _type):
    """Combine two messages with sums."""
    _combine_two(others, mine, 1)
