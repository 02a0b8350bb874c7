"""Arithmetic of the passes on the memory of CPU devices, in float32 and float64."""

import numpy as np
from numba import carray, types

from ....engine.compiled.access import address_of_field, pointer, record_at, record_type, vector
from ....engine.compiled.functions import c_callback, compiled
from ..operator_state import MXNET_FAILED, State
from .c_functions import STEP, MXNDArrayGetData

_CHUNK = 4096  # values that stay in the first-level cache between the two loops over them

# "reassoc" lets a sum become several that run side by side, as vector instructions need. Where (x - high) - low must
# stay what it says it is withheld. Neither touches NaN and infinity.
_SUMMING = {"reassoc", "contract", "nsz"}
_EXACT = {"contract", "nsz"}

state_at = record_at(State)


@compiled(types.int64(record_type(State), types.int64))
def _memory(op, handle):
    """Where the values of an array are; 0 for no array."""
    op.result = 0
    if handle != 0 and (MXNDArrayGetData(handle, address_of_field(op, "result")) != 0 or op.result == 0):
        op.failed = MXNET_FAILED  # (it is in the plain layout, so this waits for nothing)
    return op.result


@c_callback(STEP)
def open(address):
    op = state_at(address)
    op.x, op.gamma, op.beta = _memory(op, op.x), _memory(op, op.gamma), _memory(op, op.beta)
    op.y, op.dy, op.dx = _memory(op, op.y), _memory(op, op.dy), _memory(op, op.dx)
    op.dgamma, op.dbeta = _memory(op, op.dgamma), _memory(op, op.dbeta)
    op.running_mean, op.running_variance = _memory(op, op.running_mean), _memory(op, op.running_variance)


@c_callback(STEP)
def close(address):
    """Free nothing: kernels on memory hold no handles."""


_f32, _f64 = types.float32, types.float64


@compiled([types.void(record_type(State), real[::1], real[:, ::1]) for real in (_f32, _f64)], fastmath=_EXACT)
def _channel_constants(op, gamma, constants):
    """Rows of `constants`: the mean as a sum of two numbers of x's own precision; rstd * gamma.

    So float32 keeps a large mean's digits: x minus the first number is exact near it.
    """
    mean, rstd = vector(op.mean, op.channels), vector(op.rstd, op.channels)
    for c in range(op.channels):
        constants[0, c] = mean[c]
        constants[1, c] = mean[c] - np.float64(constants[0, c])
        constants[2, c] = rstd[c] * (1.0 if op.fix_gamma else np.float64(gamma[c]))


def _steps(real):
    """Compile the arithmetic for arrays of this NumPy type."""

    def step(fastmath):
        def decorate(function):
            function.__name__ = f"{function.__name__}_{real.__name__}"
            return c_callback(STEP, fastmath=fastmath)(function)

        return decorate

    @step(_SUMMING)
    def measure(address):
        # Every value is read from memory once: a chunk small enough for the cache is summed, then its squared
        # deviations from its own mean; chunks combine like shards do. So no square of a large mean is ever formed, and
        # a constant channel has m2 == 0 exactly.
        op = state_at(address)
        outer, channels, inner = op.outer, op.channels, op.inner
        x = carray(pointer(op.x), (outer, channels, inner), real)
        message = vector(op.message, 1 + 2 * channels)
        message[:] = 0.0
        message[0] = outer * inner
        mean, m2 = message[1 : 1 + channels], message[1 + channels :]
        if inner == 1:  # channels last, or no further axes: neighbours in memory are other channels
            scratch = vector(op.scratch, 2 * channels)
            sums, deviations = scratch[:channels], scratch[channels:]
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
                    chunk = x[n, c, start:stop]  # counted from 0: Numba's negative indices make it 7 times slower
                    total, square = 0.0, 0.0
                    for i in range(chunk.size):
                        total += np.float64(chunk[i])
                    average = total / chunk.size
                    for i in range(chunk.size):
                        d = np.float64(chunk[i]) - average
                        square += d * d
                    share = (stop - start) / (seen + stop - start)
                    d = average - mean[c]
                    mean[c] += d * share
                    m2[c] += square + d * d * (seen * share)

    @step(_EXACT)
    def take_batch(address):
        op = state_at(address)
        mean, variance = vector(op.mean, op.channels), vector(op.variance, op.channels)
        running_mean = carray(pointer(op.running_mean), op.channels, real)
        running_variance = carray(pointer(op.running_variance), op.channels, real)
        old, new = op.momentum, 1 - op.momentum
        for c in range(mean.size):
            running_mean[c] = old * np.float64(running_mean[c]) + new * mean[c]
            running_variance[c] = old * np.float64(running_variance[c]) + new * variance[c]

    @step(_EXACT)
    def take_running(address):
        op = state_at(address)
        mean, variance = vector(op.mean, op.channels), vector(op.variance, op.channels)
        running_mean = carray(pointer(op.running_mean), op.channels, real)
        running_variance = carray(pointer(op.running_variance), op.channels, real)
        for c in range(mean.size):  # (Numba takes seconds to compile an assignment of whole arrays of two types)
            mean[c], variance[c] = running_mean[c], running_variance[c]

    @step(_EXACT)
    def normalise(address):
        # y = ((x - high) - low) * scale + shift
        op = state_at(address)
        outer, channels, inner, add = op.outer, op.channels, op.inner, op.adds != 0
        x = carray(pointer(op.x), (outer, channels, inner), real)
        y = carray(pointer(op.y), (outer, channels, inner), real)
        gamma, shift = carray(pointer(op.gamma), channels, real), carray(pointer(op.beta), channels, real)
        constants = carray(pointer(op.scratch), (3, channels), real)
        _channel_constants(op, gamma, constants)
        high, low, scale = constants[0], constants[1], constants[2]
        for n in range(outer):
            if inner == 1:
                for c in range(channels):
                    value = ((x[n, c, 0] - high[c]) - low[c]) * scale[c] + shift[c]
                    y[n, c, 0] = y[n, c, 0] + value if add else value
                continue
            for c in range(channels):
                hi, lo, s, b = high[c], low[c], scale[c], shift[c]
                for i in range(inner):
                    value = ((x[n, c, i] - hi) - lo) * s + b
                    y[n, c, i] = y[n, c, i] + value if add else value

    @step(_SUMMING)
    def sums(address):
        op = state_at(address)
        outer, channels, inner = op.outer, op.channels, op.inner
        x = carray(pointer(op.x), (outer, channels, inner), real)
        dy = carray(pointer(op.dy), (outer, channels, inner), real)
        mean, rstd, message = vector(op.mean, channels), vector(op.rstd, channels), vector(op.message, 2 * channels)
        message[:] = 0.0
        total, dot = message[:channels], message[channels:]
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
        if op.dgamma != 0:
            dgamma = carray(pointer(op.dgamma), channels, real)
            for c in range(channels):
                value = 0.0 if op.fix_gamma else dot[c] * rstd[c]
                dgamma[c] = np.float64(dgamma[c]) + value if op.adds_gamma else value
        if op.dbeta != 0:
            dbeta = carray(pointer(op.dbeta), channels, real)
            for c in range(channels):
                dbeta[c] = np.float64(dbeta[c]) + total[c] if op.adds_beta else total[c]

    @step(_EXACT)
    def gradient(address):
        # dx = a * dy - b * (x - mean) - k
        op = state_at(address)
        outer, channels, inner, add = op.outer, op.channels, op.inner, op.adds != 0
        x = carray(pointer(op.x), (outer, channels, inner), real)
        dy = carray(pointer(op.dy), (outer, channels, inner), real)
        dx = carray(pointer(op.dx), (outer, channels, inner), real)
        gamma, count = carray(pointer(op.gamma), channels, real), max(op.count, 1.0)
        rstd, message = vector(op.rstd, channels), vector(op.message, 2 * channels)
        constants = carray(pointer(op.scratch), (5, channels), real)
        constants[3:] = 0
        _channel_constants(op, gamma, constants)
        high, low, a, b, k = constants[0], constants[1], constants[2], constants[3], constants[4]
        if op.call >= 0:  # else the statistics are constants, and nothing more depends on x
            for c in range(channels):
                factor = rstd[c] * (1.0 if op.fix_gamma else np.float64(gamma[c]))
                b[c] = factor * rstd[c] * rstd[c] * message[channels + c] / count
                k[c] = factor * message[c] / count
        for n in range(outer):
            if inner == 1:
                for c in range(channels):
                    value = a[c] * dy[n, c, 0] - b[c] * ((x[n, c, 0] - high[c]) - low[c]) - k[c]
                    dx[n, c, 0] = dx[n, c, 0] + value if add else value
                continue
            for c in range(channels):
                hi, lo, p, q, r = high[c], low[c], a[c], b[c], k[c]
                for i in range(inner):
                    value = p * dy[n, c, i] - q * ((x[n, c, i] - hi) - lo) - r
                    dx[n, c, i] = dx[n, c, i] + value if add else value


_steps(np.float32)
_steps(np.float64)
