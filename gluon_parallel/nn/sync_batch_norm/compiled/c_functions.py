"""C functions that compiled code calls: MXNet's C API, and Python functions, which take Python's lock."""

from numba import types

from ....engine.compiled.functions import c_function

STEP = types.void(types.int64)  # the signature of the functions of an `Arithmetic`

MXImperativeInvoke = c_function("MXImperativeInvoke", 8)
MXInvokeCachedOp = c_function("MXInvokeCachedOp", 5)
MXNDArrayCreateNone = c_function("MXNDArrayCreateNone", 1)
MXNDArrayFree = c_function("MXNDArrayFree", 1)
MXNDArrayGetData = c_function("MXNDArrayGetData", 2)
MXNDArrayReshape64 = c_function("MXNDArrayReshape64", 5)
MXNDArraySyncCopyFromCPU = c_function("MXNDArraySyncCopyFromCPU", 3)
MXNDArraySyncCopyToCPU = c_function("MXNDArraySyncCopyToCPU", 3)

# See `operator_state.passes` and `operator.load`.
allreduce_devices_in_python = c_function("allreduce_devices_in_python", 3)
allreduce_processes_in_python = c_function("allreduce_processes_in_python", 4)
fail_in_python = c_function("fail_in_python", 4)
describe_in_python = c_function("describe_in_python", 4)
create_in_python = c_function("create_in_python", 7)
