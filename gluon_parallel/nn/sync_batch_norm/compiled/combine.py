"""How the messages of devices, and of processes, become one, exact for shards of any size."""

from numba import types

from ....engine.atomics import compiled

_Rows, _Vector = types.float64[:, :], types.float64[::1]


@compiled(types.void(_Rows, _Vector))
def combine_moments(rows, result):
    """The moments of all values together, from rows of (1 + 2C,) count, mean and squared deviations from that mean.

    The sum of squares is never formed: at a mean of 1e6 and a variance of 1 it would need 41 bits before the first bit
    of the variance. And the mean moves by offsets from one row's, so that rows that agree combine to what they say.
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


@compiled(types.void(_Rows, types.int64, _Vector))
def combine(rows, direction, result):
    """The message of all rows: moments in the forward pass (direction 0), sums in the backward pass."""
    if direction == 0:
        combine_moments(rows, result)
        return
    result[:] = 0.0
    for number in range(len(rows)):
        for i in range(result.size):
            result[i] += rows[number, i]
