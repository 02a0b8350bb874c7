"""Arithmetic of the passes on the memory of CPU devices, in float32 and float64."""

import numpy as np
from numba import boolean, float32, float64, from_dtype, types, void

from ....engine.atomics import compiled, vector
from ..operator_state import ADD, NULL, STATE

_CHUNK = 4096  # values that stay in the first-level cache between the two loops over them

# "reassoc" lets a sum become several that run side by side, as vector instructions need. Where (x - high) - low must
# stay what it says it is withheld. Neither touches NaN and infinity.
_SUMMING = {"reassoc", "contract", "nsz"}
_EXACT = {"contract", "nsz"}
_ARRAYS = [(real[:, :, ::1], real[::1]) for real in (float32, float64)]  # x and so on (outer, C, inner); gamma ... (C,)
_State, _wide = from_dtype(STATE), float64[::1]


@compiled([void(x, _wide, _wide) for x, _ in _ARRAYS], fastmath=_SUMMING)
def _measure(x, mean, m2):
    """Moments of x (outer, C, inner) into mean, m2 (C,): every value is read from memory once.

    A chunk small enough for the cache is summed, then its squared deviations from its own mean; chunks combine like
    shards do. So no square of a large mean is ever formed, and a constant channel has m2 == 0 exactly.
    """
    outer, channels, inner = x.shape
    mean[:] = 0.0
    m2[:] = 0.0
    if inner == 1:  # channels last, or no further axes: neighbours in memory are other channels
        sums = np.empty(channels)
        deviations = np.empty(channels)
        rows = max(1, _CHUNK // max(1, channels))
        for start in range(0, outer, rows):
            stop = min(outer, start + rows)
            sums[:] = 0.0
            deviations[:] = 0.0
            block = x[start:stop]
            for n in range(len(block)):
                for c in range(channels):
                    sums[c] += np.float64(block[n, c, 0])
            sums /= stop - start
            for n in range(len(block)):
                for c in range(channels):
                    d = np.float64(block[n, c, 0]) - sums[c]
                    deviations[c] += d * d
            share = (stop - start) / stop
            for c in range(channels):
                d = sums[c] - mean[c]
                mean[c] += d * share
                m2[c] += deviations[c] + d * d * (start * share)
        return
    for n in range(outer):
        for c in range(channels):
            for start in range(0, inner, _CHUNK):
                stop = min(inner, start + _CHUNK)
                seen = n * inner + start
                chunk = x[n, c, start:stop]  # counted from 0, or Numba allows for negative indices: 7 times slower
                total = 0.0
                for i in range(chunk.size):
                    total += np.float64(chunk[i])
                average = total / chunk.size
                square = 0.0
                for i in range(chunk.size):
                    d = np.float64(chunk[i]) - average
                    square += d * d
                share = (stop - start) / (seen + stop - start)
                d = average - mean[c]
                mean[c] += d * share
                m2[c] += square + d * d * (seen * share)


@compiled([void(x, x, v, v, v, v, boolean) for x, v in _ARRAYS], fastmath=_EXACT)
def _normalise(x, y, high, low, scale, shift, add):
    """y = ((x - high) - low) * scale + shift, in x's own precision: x - high is exact near the mean."""
    outer, channels, inner = x.shape
    for n in range(outer):
        if inner == 1:
            if add:
                for c in range(channels):
                    y[n, c, 0] += ((x[n, c, 0] - high[c]) - low[c]) * scale[c] + shift[c]
            else:
                for c in range(channels):
                    y[n, c, 0] = ((x[n, c, 0] - high[c]) - low[c]) * scale[c] + shift[c]
            continue
        for c in range(channels):
            hi, lo, s, b = high[c], low[c], scale[c], shift[c]
            if add:
                for i in range(inner):
                    y[n, c, i] += ((x[n, c, i] - hi) - lo) * s + b
            else:
                for i in range(inner):
                    y[n, c, i] = ((x[n, c, i] - hi) - lo) * s + b


@compiled([void(x, x, _wide, _wide, _wide) for x, _ in _ARRAYS], fastmath=_SUMMING)
def _sums(x, dy, mean, total, dot):
    """total = sum dy, dot = sum dy * (x - mean) per channel, in float64."""
    outer, channels, inner = x.shape
    total[:] = 0.0
    dot[:] = 0.0
    for n in range(outer):
        if inner == 1:
            for c in range(channels):
                g = np.float64(dy[n, c, 0])
                total[c] += g
                dot[c] += g * (np.float64(x[n, c, 0]) - mean[c])
            continue
        for c in range(channels):
            m = mean[c]
            s, d = 0.0, 0.0
            for i in range(inner):
                g = np.float64(dy[n, c, i])
                s += g
                d += g * (np.float64(x[n, c, i]) - m)
            total[c] += s
            dot[c] += d


@compiled([void(x, x, x, v, v, v, v, v, boolean) for x, v in _ARRAYS], fastmath=_EXACT)
def _gradient(x, dy, dx, high, low, a, b, k, add):
    """dx = a * dy - b * (x - mean) - k."""
    outer, channels, inner = x.shape
    for n in range(outer):
        if inner == 1:
            if add:
                for c in range(channels):
                    dx[n, c, 0] += a[c] * dy[n, c, 0] - b[c] * ((x[n, c, 0] - high[c]) - low[c]) - k[c]
            else:
                for c in range(channels):
                    dx[n, c, 0] = a[c] * dy[n, c, 0] - b[c] * ((x[n, c, 0] - high[c]) - low[c]) - k[c]
            continue
        for c in range(channels):
            hi, lo, p, q, r = high[c], low[c], a[c], b[c], k[c]
            if add:
                for i in range(inner):
                    dx[n, c, i] += p * dy[n, c, i] - q * ((x[n, c, i] - hi) - lo) - r
            else:
                for i in range(inner):
                    dx[n, c, i] = p * dy[n, c, i] - q * ((x[n, c, i] - hi) - lo) - r


@compiled([void(v, _wide, float64) for _, v in _ARRAYS])
def follow(running, batch, momentum):
    """A running statistic follows that of a batch."""
    for c in range(running.size):
        running[c] = momentum * np.float64(running[c]) + (1 - momentum) * batch[c]


@compiled([void(_State, real[:, ::1]) for real in (float32, float64)])
def _split_mean(op, factors):
    """The mean as the sum of two numbers of the arrays' precision, so that float32 keeps a large mean's digits."""
    mean = vector(op.mean, op.channels)
    for c in range(mean.size):
        factors[0, c] = mean[c]
        factors[1, c] = mean[c] - np.float64(factors[0, c])


@compiled([void(_State, x) for x, _ in _ARRAYS])
def measure(op, x):
    """See :mod:`arithmetic`, for all of these."""
    message = vector(op.message, 1 + 2 * op.channels)
    message[0] = op.outer * op.inner
    _measure(x, message[1 : 1 + op.channels], message[1 + op.channels :])


@compiled([void(_State, v, v) for _, v in _ARRAYS])
def take_batch(op, running_mean, running_variance):
    follow(running_mean, vector(op.mean, op.channels), op.momentum)
    follow(running_variance, vector(op.variance, op.channels), op.momentum)


@compiled([void(_State, v, v) for _, v in _ARRAYS])
def take_running(op, running_mean, running_variance):
    mean, variance = vector(op.mean, op.channels), vector(op.variance, op.channels)
    for c in range(mean.size):
        mean[c], variance[c] = running_mean[c], running_variance[c]


@compiled([void(_State, x, v, v, x, boolean) for x, v in _ARRAYS])
def normalise(op, x, gamma, beta, y, add):
    factors = np.empty((3, op.channels), x.dtype)
    _split_mean(op, factors)
    rstd = vector(op.rstd, op.channels)
    for c in range(rstd.size):
        factors[2, c] = rstd[c] * (1.0 if op.fix_gamma else np.float64(gamma[c]))
    _normalise(x, y, factors[0], factors[1], factors[2], beta, add)


@compiled([void(_State, x, x, v, v, types.int64, types.int64) for x, v in _ARRAYS])
def sums(op, x, dy, dgamma, dbeta, gamma_request, beta_request):
    message, rstd = vector(op.message, 2 * op.channels), vector(op.rstd, op.channels)
    total, dot = message[: op.channels], message[op.channels :]
    _sums(x, dy, vector(op.mean, op.channels), total, dot)
    for c in range(rstd.size):
        value = 0.0 if op.fix_gamma else dot[c] * rstd[c]
        if gamma_request != NULL:
            dgamma[c] = np.float64(dgamma[c]) + value if gamma_request == ADD else value
        if beta_request != NULL:
            dbeta[c] = np.float64(dbeta[c]) + total[c] if beta_request == ADD else total[c]


@compiled([void(_State, x, x, v, x, boolean) for x, v in _ARRAYS])
def gradient(op, x, dy, gamma, dx, add):
    message, rstd, count = vector(op.message, 2 * op.channels), vector(op.rstd, op.channels), max(op.count, 1.0)
    factors = np.empty((5, op.channels), x.dtype)
    _split_mean(op, factors)
    for c in range(rstd.size):
        factor = rstd[c] * (1.0 if op.fix_gamma else np.float64(gamma[c]))
        factors[2, c] = factor
        factors[3, c] = factors[4, c] = 0.0
        if op.call >= 0:  # else the statistics are constants, and nothing more depends on x
            factors[3, c] = factor * rstd[c] * rstd[c] * message[op.channels + c] / count
            factors[4, c] = factor * message[c] / count
    _gradient(x, dy, dx, factors[0], factors[1], factors[2], factors[3], factors[4], add)
