"""C functions that compiled code calls by name: locks of the C library, MXNet's C API, Python's helpers."""

import ctypes

import llvmlite.binding
import numpy as np
from numba import types

from ....compat import mx
from ....engine.atomics import compiled
from .. import operator_state

STEP = types.void(types.int64)  # the signature of the functions of an `Arithmetic`
SECOND = 1_000_000_000  # nanoseconds


def _define(name, function):
    """Let compiled code call `function`, a ctypes function that lives on, by that name."""
    llvmlite.binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)


def _function(name, num_arguments):
    """A function of so many words that returns an ``int``; looked up when code is loaded, which may be kept on disk."""
    return types.ExternalFunction(name, types.int32(*[types.int64] * num_arguments))


def _of_mxnet(name, num_arguments):
    _define(name, getattr(mx.base._LIB, name))
    return _function(name, num_arguments)


pthread_mutex_lock = _function("pthread_mutex_lock", 1)
pthread_mutex_unlock = _function("pthread_mutex_unlock", 1)
pthread_cond_broadcast = _function("pthread_cond_broadcast", 1)
pthread_cond_timedwait = _function("pthread_cond_timedwait", 3)

MXInvokeCachedOp = _of_mxnet("MXInvokeCachedOp", 5)
MXNDArrayFree = _of_mxnet("MXNDArrayFree", 1)
MXNDArrayGetData = _of_mxnet("MXNDArrayGetData", 2)
MXNDArrayReshape64 = _of_mxnet("MXNDArrayReshape64", 5)
MXNDArraySyncCopyFromCPU = _of_mxnet("MXNDArraySyncCopyFromCPU", 3)
MXNDArraySyncCopyToCPU = _of_mxnet("MXNDArraySyncCopyToCPU", 3)

_define("gluon_parallel_ask_python", operator_state.ask_python)
ask_python = _function("gluon_parallel_ask_python", 4)


@compiled(types.int32(types.int64, types.int64, types.int64))
def wait_until(condition, mutex, end):
    """Wait for the condition until `end`, nanoseconds of its clock; returns 0, or ``ETIMEDOUT``."""
    time = np.empty(2, np.int64)  # timespec
    time[0], time[1] = end // SECOND, end % SECOND
    status = pthread_cond_timedwait(condition, mutex, time.ctypes.data)
    time[0] = 0  # Numba frees an array after its last use, which must not come before the call
    return status
