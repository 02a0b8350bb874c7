"""The custom operator's forward and backward pass, which MXNet calls without Python's lock, on any device.

What goes wrong, or is late, is left to Python.
"""

import numpy as np
from numba import carray, types

from ....engine.compiled.access import add, address, load, now, record_at, record_type, vector
from ....engine.compiled.functions import MONOTONIC, PROCESSOR, c_callback, call, compiled
from ....engine.ending import InterpreterState
from .. import operator_state as state
from ..operator_state import Arithmetic, Counter, Deletion, State
from .c_functions import MXNDArrayFree, allreduce_devices_in_python, fail_in_python
from .kernels import state_at
from .rendezvous import BACKWARD, FORWARD, add_spent, allreduce, layer_at

_State, _i64 = record_type(State), types.int64
_arithmetic_at, _counter_at, _deletion_at, _ends_at = map(record_at, (Arithmetic, Counter, Deletion, InterpreterState))
_Handles = types.int64[::1]
_CALLBACK = types.int32(types.int32, types.voidptr, types.voidptr, types.voidptr, types.int32, types.voidptr)


@compiled(types.void(_State, _i64))
def _run(op, step):
    """Take a step of the operator's arithmetic, unless an earlier one has failed."""
    if not op.failed:
        call(step, address(op), 0, 0)


@compiled(types.void(_State, _i64))
def _allreduce(op, direction):
    """The message becomes that of all devices and processes."""
    if op.failed:
        return
    op.arrived_at = now(MONOTONIC)
    key = 2 * op.call + direction
    op.complete_at = allreduce(op.layer, key, op.device, op.message, address(op))
    if op.complete_at == 0:
        if allreduce_devices_in_python(address(op), key, op.message) != 0:
            op.failed = state.NOT_REDUCED
    op.reduced_at = now(MONOTONIC)


@compiled(types.int32(_State, _Handles, _i64, _i64, _i64))
def _finish(op, handles, direction, began, began_processor):
    """Free the handles; if the pass has failed, let Python fail the arrays that it should have written.

    Returns 0 for MXNet only if the failure could not be reported in any other way, else 1.
    """
    call(_arithmetic_at(op.arithmetic).close, address(op), 0, 0)
    reported = True
    first, after = state.OUTPUTS[direction]
    if op.failed:
        reported = fail_in_python(address(op), op.failed, direction, handles.ctypes.data) == 0
    for number in range(handles.size):
        if not op.failed or not first <= number < after:
            MXNDArrayFree(handles[number])
    add_spent(op, direction, began, now(PROCESSOR) - began_processor)
    return 1 if reported else 0


@compiled(types.void(_State, _i64))
def _forward(op, is_train):
    steps, channels = _arithmetic_at(op.arithmetic), op.channels
    _run(op, steps.open)
    mean, variance, rstd = vector(op.mean, channels), vector(op.variance, channels), vector(op.rstd, channels)
    if is_train and not op.constant:
        # All devices' (count, mean, squared deviations), in one message, so each layer waits once.
        op.call = add(_counter_at(op.calls), "value", 1)
        _run(op, steps.measure)
        message = vector(op.message, 1 + 2 * channels)
        if layer_at(op.layer).without_samples:
            message[:] = 0.0
        _allreduce(op, FORWARD)
        op.count = message[0]
        for c in range(channels):
            mean[c] = message[1 + c]
            variance[c] = message[1 + channels + c] / max(op.count, 1.0)
        _run(op, steps.take_batch if op.count > 0 else steps.take_running)  # of a group, no process may have samples
    else:
        _run(op, steps.take_running)
    for c in range(channels):
        rstd[c] = 1 / np.sqrt(variance[c] + op.epsilon)
    if op.y != 0:
        _run(op, steps.normalise)
    op.valid = not op.failed


@compiled(types.void(_State))
def _backward(op):
    if not op.valid:
        op.failed = state.NO_FORWARD
    steps = _arithmetic_at(op.arithmetic)
    _run(op, steps.open)
    if op.call >= 0 or op.dgamma != 0 or op.dbeta != 0:
        _run(op, steps.sums)
    if op.call >= 0:
        _allreduce(op, BACKWARD)
    if op.dx != 0:
        _run(op, steps.gradient)


@c_callback(_CALLBACK)
def forward(num, handles, _tags, requests, is_train, operator):
    """MXNet's forward callback: x, gamma, beta; y; running mean and variance."""
    began, began_processor = now(MONOTONIC), now(PROCESSOR)
    op, arrays = state_at(address(operator)), carray(handles, num, np.int64)
    request = carray(requests, 1, np.int32)[0]
    op.valid = op.failed = 0  # what a failed forward pass must not leave to the backward pass
    op.call = -1
    op.x, op.gamma, op.beta = arrays[0], arrays[1], arrays[2]
    op.running_mean, op.running_variance = arrays[4], arrays[5]
    op.y, op.adds = arrays[3] if request != state.NULL else 0, request == state.ADD
    op.dy = op.dx = op.dgamma = op.dbeta = 0
    _forward(op, is_train)
    return _finish(op, arrays, FORWARD, began, began_processor)


@c_callback(_CALLBACK)
def backward(num, handles, _tags, requests, _is_train, operator):
    """MXNet's backward callback: dy, x, gamma, two empty ones; dx, dgamma, dbeta; running mean and variance."""
    began, began_processor = now(MONOTONIC), now(PROCESSOR)
    op, arrays = state_at(address(operator)), carray(handles, num, np.int64)
    wanted = carray(requests, 3, np.int32)
    op.failed = op.beta = op.y = op.running_mean = op.running_variance = 0
    op.dy, op.x, op.gamma = arrays[0], arrays[1], arrays[2]
    op.dx, op.adds = arrays[5] if wanted[0] != state.NULL else 0, wanted[0] == state.ADD
    op.dgamma, op.adds_gamma = arrays[6] if wanted[1] != state.NULL else 0, wanted[1] == state.ADD
    op.dbeta, op.adds_beta = arrays[7] if wanted[2] != state.NULL else 0, wanted[2] == state.ADD
    _backward(op)
    return _finish(op, arrays, BACKWARD, began, began_processor)


@c_callback(_i64(_i64, _i64, _i64, _i64, _i64))
def exchange(address, key, device, message, operator):
    """:func:`.rendezvous.allreduce`, for measurements and tests."""
    return allreduce(address, key, device, message, operator)


@c_callback(types.int32(types.voidptr))
def delete(deletion):
    """MXNet's callback when it has no use for an operator or its description: call Python, unless that has ended.

    MXNet calls it from destructors, in any thread and at any time. Python would end a thread that came after its end,
    and C++ the process.
    """
    asked = _deletion_at(address(deletion))
    ends = _ends_at(asked.python)
    add(ends, "num_calls", 1)
    if load(ends, "has_ended") == 0:
        call(asked.function, asked.argument, 0, 0)
    add(ends, "num_calls", -1)
    return 1
