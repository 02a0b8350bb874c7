"""C functions that compiled code calls by name: locks of the C library, MXNet's C API, Python's helpers."""

import numpy as np
from numba import types

from ....engine.atomics import c_function, compiled, define, mxnet_function
from .. import operator_state

STEP = types.void(types.int64)  # the signature of the functions of an `Arithmetic`
SECOND = 1_000_000_000  # nanoseconds

pthread_mutex_lock = c_function("pthread_mutex_lock", 1)
pthread_mutex_unlock = c_function("pthread_mutex_unlock", 1)
pthread_cond_broadcast = c_function("pthread_cond_broadcast", 1)
pthread_cond_timedwait = c_function("pthread_cond_timedwait", 3)

MXImperativeInvoke = mxnet_function("MXImperativeInvoke", 8)
MXInvokeCachedOp = mxnet_function("MXInvokeCachedOp", 5)
MXNDArrayCreateNone = mxnet_function("MXNDArrayCreateNone", 1)
MXNDArrayFree = mxnet_function("MXNDArrayFree", 1)
MXNDArrayGetData = mxnet_function("MXNDArrayGetData", 2)
MXNDArrayReshape64 = mxnet_function("MXNDArrayReshape64", 5)
MXNDArraySyncCopyFromCPU = mxnet_function("MXNDArraySyncCopyFromCPU", 3)
MXNDArraySyncCopyToCPU = mxnet_function("MXNDArraySyncCopyToCPU", 3)

define("gluon_parallel_ask_python", operator_state.ask_python)
ask_python = c_function("gluon_parallel_ask_python", 4)


@compiled(types.int32(types.int64, types.int64, types.int64))
def wait_until(condition, mutex, end):
    """Wait for the condition until `end`, nanoseconds of its clock; returns 0, or ``ETIMEDOUT``."""
    time = np.empty(2, np.int64)  # timespec
    time[0], time[1] = end // SECOND, end % SECOND
    status = pthread_cond_timedwait(condition, mutex, time.ctypes.data)
    time[0] = 0  # Numba frees an array after its last use, which must not come before the call
    return status
