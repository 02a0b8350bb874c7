"""C functions that compiled code calls: MXNet's C API, and Python functions, which take Python's lock."""

import ctypes
from typing import Any

from numba import types

from ....engine.compiled.functions import mxnet_function, python_function
from ....engine.ending import keep_after_end
from .. import operator
from ..operator_state import Arithmetic, OperatorState, answering

STEP = types.void(types.int64)  # the signature of the functions of an `Arithmetic`

MXImperativeInvoke = mxnet_function("MXImperativeInvoke", 8)
MXInvokeCachedOp = mxnet_function("MXInvokeCachedOp", 5)
MXNDArrayCreateNone = mxnet_function("MXNDArrayCreateNone", 1)
MXNDArrayFree = mxnet_function("MXNDArrayFree", 1)
MXNDArrayGetData = mxnet_function("MXNDArrayGetData", 2)
MXNDArrayReshape64 = mxnet_function("MXNDArrayReshape64", 5)
MXNDArraySyncCopyFromCPU = mxnet_function("MXNDArraySyncCopyFromCPU", 3)
MXNDArraySyncCopyToCPU = mxnet_function("MXNDArraySyncCopyToCPU", 3)

_word, _strings, _integers = ctypes.c_int64, ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_int)
allreduce_devices_in_python = python_function(answering(OperatorState.allreduce_devices), *[_word] * 3)
allreduce_processes_in_python = python_function(answering(OperatorState.allreduce_processes), *[_word] * 4)
fail_in_python = python_function(answering(OperatorState.fail), *[_word] * 4)
describe_in_python = python_function(operator.describe, _word, _strings, _strings, _word)
create_in_python = python_function(
    operator.create, ctypes.c_char_p, _word, ctypes.POINTER(_integers), _integers, _integers, _word, _word
)


def arithmetic_of(*steps: Any) -> Arithmetic:
    """An Arithmetic of these compiled functions, in the order of its fields."""
    return keep_after_end(Arithmetic(*(step.address for step in keep_after_end(steps))))
