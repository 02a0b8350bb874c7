"""The custom operator's forward and backward pass, which MXNet calls without Python's lock, on any device.

What goes wrong, or is late, is left to Python.
"""

import numba
import numpy as np
from numba import carray, from_dtype, types

from ....engine.atomics import address, compiled, pointer, vector
from ..operator_state import NO_FORWARD, NOT_MET, NULL, OUTPUTS, STATE
from . import arithmetic
from .arithmetic import opened
from .c_functions import MONOTONIC, PROCESSOR, MXNDArrayFree, now, python_fail, python_meet
from .meet import BACKWARD, FORWARD, add_spent, meet, next_call

_State, _i64 = from_dtype(STATE), types.int64
_Handles = types.int64[::1]
_CALLBACK = types.int32(types.int32, types.voidptr, types.voidptr, types.voidptr, types.int32, types.voidptr)


@compiled(_State(_i64))
def _state_at(where):
    return carray(pointer(where), 1, STATE)[0]


@compiled(types.void(_State, _i64))
def _meet_others(op, direction):
    """The message becomes that of all devices and processes."""
    op.came_at = now(MONOTONIC)
    key = 2 * op.call + direction
    if not meet(op.layer, key, op.device, op.message, op.address):
        if python_meet(op.address, key, op.message) != 0:
            op.failed = NOT_MET


@compiled(types.int32(_State, _Handles, _i64, _i64, _i64))
def _finish(op, handles, direction, began, began_processor):
    """Give the arrays back; if the pass has failed, those that it should have written to Python, which spoils them.

    Returns what MXNet wants to hear: 0 only if nobody could be told in any other way.
    """
    arithmetic.close(op)
    told = True
    first, after = OUTPUTS[direction]
    if op.failed:
        told = python_fail(op.address, 2 * op.failed + direction, handles.ctypes.data) == 0
    for number in range(handles.size):
        if not op.failed or not first <= number < after:
            MXNDArrayFree(handles[number])
    add_spent(op.layer, now(MONOTONIC) - began, now(PROCESSOR) - began_processor)
    return 1 if told else 0


@compiled(types.void(_State, _Handles, _i64, _i64))
def _forward(op, arrays, request, is_train):
    x, gamma, beta = opened(op, arrays[0]), opened(op, arrays[1]), opened(op, arrays[2])
    y, running_mean, running_variance = opened(op, arrays[3]), opened(op, arrays[4]), opened(op, arrays[5])
    if op.failed:
        return
    channels = op.channels
    mean, variance, rstd = vector(op.mean, channels), vector(op.variance, channels), vector(op.rstd, channels)
    if is_train and not op.constant:
        # Everybody's (count, mean, squared deviations), in one message, so each layer waits once.
        op.call = next_call(op.layer, op.calls)
        arithmetic.measure(op, x)
        if not op.failed:
            _meet_others(op, FORWARD)
        if op.failed:
            return
        message = vector(op.message, 1 + 2 * channels)
        op.count = message[0]
        for c in range(channels):
            mean[c] = message[1 + c]
            variance[c] = message[1 + channels + c] / max(op.count, 1.0)
        arithmetic.take_batch(op, running_mean, running_variance)
    else:
        arithmetic.take_running(op, running_mean, running_variance)
    for c in range(channels):
        rstd[c] = 1 / np.sqrt(variance[c] + op.epsilon)
    if request != NULL:
        arithmetic.normalise(op, x, gamma, beta, y, request)
    op.valid = not op.failed


@compiled(types.void(_State, _Handles, types.int32[::1]))
def _backward(op, arrays, requests):
    if not op.valid:
        op.failed = NO_FORWARD
        return
    dy, x, gamma = opened(op, arrays[0]), opened(op, arrays[1]), opened(op, arrays[2])
    dx = opened(op, arrays[5]) if requests[0] != NULL else 0
    dgamma, dbeta = opened(op, arrays[6]), opened(op, arrays[7])
    if op.failed:
        return
    is_constant = op.call < 0
    if not is_constant or requests[1] != NULL or requests[2] != NULL:
        arithmetic.sums(op, x, dy, dgamma, dbeta, requests[1], requests[2])
    if not is_constant and not op.failed:
        _meet_others(op, BACKWARD)
    if requests[0] != NULL and not op.failed:
        arithmetic.gradient(op, x, dy, gamma, dx, requests[0])


@compiled(_CALLBACK, make=numba.cfunc)
def forward(num, handles, _tags, requests, is_train, operator):
    """MXNet's forward callback: x, gamma, beta; y; running mean and variance."""
    began, began_processor = now(MONOTONIC), now(PROCESSOR)
    op, arrays = _state_at(address(operator)), carray(handles, num, np.int64)
    op.valid = op.failed = 0  # what a failed forward pass must not leave to the backward pass
    op.call = -1
    arithmetic.begin(op)
    _forward(op, arrays, carray(requests, 1, np.int32)[0], is_train)
    return _finish(op, arrays, FORWARD, began, began_processor)


@compiled(_CALLBACK, make=numba.cfunc)
def backward(num, handles, _tags, requests, _is_train, operator):
    """MXNet's backward callback: dy, x, gamma, two empty ones; dx, dgamma, dbeta; running mean and variance."""
    began, began_processor = now(MONOTONIC), now(PROCESSOR)
    op, arrays = _state_at(address(operator)), carray(handles, num, np.int64)
    op.failed = 0
    arithmetic.begin(op)
    _backward(op, arrays, carray(requests, 3, np.int32))
    return _finish(op, arrays, BACKWARD, began, began_processor)
