"""The steps of a layer's passes, each by the arithmetic that its operator was made with.

`x`, `y`, `dy`, `dx`, `gamma` and so on are what :func:`opened` makes of MXNet's arrays; the shard's vectors are on the
host, in the operator's state. A step that fails says so in ``op.failed``.
"""

import numpy as np
from numba import carray, from_dtype, types

from ....engine.atomics import compiled, pointer
from ..operator_state import ADD, MXNET_FAILED, OPERATORS, STATE
from . import memory, operators
from .c_functions import MXNDArrayGetData

_State, _array, _request, _nothing = from_dtype(STATE), types.int64, types.int64, types.void


@compiled(_array(_State, types.int64))
def opened(op, handle):
    """An array as the arithmetic takes it: its handle, or where its values are."""
    if op.arithmetic == OPERATORS:
        return handle
    found = carray(pointer(op.results), 1, np.int64)
    found[0] = 0
    if MXNDArrayGetData(handle, op.results) != 0 or found[0] == 0:  # it is in the plain layout: nobody is waited for
        op.failed = MXNET_FAILED
    return found[0]


@compiled(types.float32[:, :, ::1](_State, _array))
def _x32(op, array):
    return carray(pointer(array), (op.outer, op.channels, op.inner), np.float32)


@compiled(types.float64[:, :, ::1](_State, _array))
def _x64(op, array):
    return carray(pointer(array), (op.outer, op.channels, op.inner), np.float64)


@compiled(types.float32[::1](_State, _array))
def _c32(op, array):
    return carray(pointer(array), op.channels, np.float32)


@compiled(types.float64[::1](_State, _array))
def _c64(op, array):
    return carray(pointer(array), op.channels, np.float64)


@compiled(_nothing(_State, _array))
def measure(op, x):
    """The message becomes the shard's moments: (1 + 2 C,) count, mean, squared deviations."""
    if op.arithmetic == OPERATORS:
        operators.measure(op, x)
    elif op.is_double:
        memory.measure(op, _x64(op, x))
    else:
        memory.measure(op, _x32(op, x))


@compiled(_nothing(_State, _array, _array))
def take_batch(op, running_mean, running_variance):
    """The batch's mean and variance are what follows uses; the running statistics follow them."""
    if op.arithmetic == OPERATORS:
        operators.take_batch(op, running_mean, running_variance)
    elif op.is_double:
        memory.take_batch(op, _c64(op, running_mean), _c64(op, running_variance))
    else:
        memory.take_batch(op, _c32(op, running_mean), _c32(op, running_variance))


@compiled(_nothing(_State, _array, _array))
def take_running(op, running_mean, running_variance):
    """The running statistics, as they are now, are what follows uses."""
    if op.arithmetic == OPERATORS:
        operators.take_running(op, running_mean, running_variance)
    elif op.is_double:
        memory.take_running(op, _c64(op, running_mean), _c64(op, running_variance))
    else:
        memory.take_running(op, _c32(op, running_mean), _c32(op, running_variance))


@compiled(_nothing(_State, *[_array] * 4, _request))
def normalise(op, x, gamma, beta, y, request):
    """y = (x - mean) * rstd * gamma + beta."""
    if op.arithmetic == OPERATORS:
        operators.normalise(op, x, gamma, beta, y, request)
    elif op.is_double:
        memory.normalise(op, _x64(op, x), _c64(op, gamma), _c64(op, beta), _x64(op, y), request == ADD)
    else:
        memory.normalise(op, _x32(op, x), _c32(op, gamma), _c32(op, beta), _x32(op, y), request == ADD)


@compiled(_nothing(_State, *[_array] * 4, *[_request] * 2))
def sums(op, x, dy, dgamma, dbeta, gamma_request, beta_request):
    """The message becomes (2 C,): sum dy, sum dy * (x - mean), of which the shard's dbeta and dgamma are made.

    Each device keeps its own shard's share of these: whoever sums gradients over devices adds them up.
    """
    if op.arithmetic == OPERATORS:
        operators.sums(op, x, dy, dgamma, dbeta, gamma_request, beta_request)
    elif op.is_double:
        memory.sums(op, _x64(op, x), _x64(op, dy), _c64(op, dgamma), _c64(op, dbeta), gamma_request, beta_request)
    else:
        memory.sums(op, _x32(op, x), _x32(op, dy), _c32(op, dgamma), _c32(op, dbeta), gamma_request, beta_request)


@compiled(_nothing(_State, *[_array] * 4, _request))
def gradient(op, x, dy, gamma, dx, request):
    """dx = gamma * rstd * (dy - mean of dy - xhat * mean of dy * xhat), the means those of the message."""
    if op.arithmetic == OPERATORS:
        operators.gradient(op, x, dy, gamma, dx, request)
    elif op.is_double:
        memory.gradient(op, _x64(op, x), _x64(op, dy), _c64(op, gamma), _x64(op, dx), request == ADD)
    else:
        memory.gradient(op, _x32(op, x), _x32(op, dy), _c32(op, gamma), _x32(op, dx), request == ADD)


@compiled(_nothing(_State))
def begin(op):
    """At the beginning of a pass."""
    if op.arithmetic == OPERATORS:
        operators.begin(op)


@compiled(_nothing(_State))
def close(op):
    """At the end of a pass, however it has ended."""
    if op.arithmetic == OPERATORS:
        operators.close(op)
