"""C functions that compiled code calls by name: locks and clocks of the C library, MXNet's C API, Python's helpers."""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic

from ....compat import mx
from ....engine.atomics import MONOTONIC as MONOTONIC
from ....engine.atomics import PROCESSOR as PROCESSOR
from ....engine.atomics import now as now
from .. import operator_state

intrinsic: Any = _intrinsic  # whose functions take one argument less than they say
_WORD, _INT = ir.IntType(64), ir.IntType(32)
STEP = types.void(types.int64)  # the signature of the functions of an `Arithmetic`


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

MXInvokeCachedOp = _of_mxnet("MXInvokeCachedOp", 5)
MXNDArrayFree = _of_mxnet("MXNDArrayFree", 1)
MXNDArrayGetData = _of_mxnet("MXNDArrayGetData", 2)
MXNDArrayReshape64 = _of_mxnet("MXNDArrayReshape64", 5)
MXNDArraySyncCopyFromCPU = _of_mxnet("MXNDArraySyncCopyFromCPU", 3)
MXNDArraySyncCopyToCPU = _of_mxnet("MXNDArraySyncCopyToCPU", 3)

_define("gluon_parallel_ask_python", operator_state.ask_python)
ask_python = _function("gluon_parallel_ask_python", 4)


def _call(builder, name, result, arguments):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@intrinsic
def run(typing, step, address):
    """Call the function of an `Arithmetic` at the address `step`."""

    def code(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [_WORD])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def wait_until(typing, condition, mutex, end):
    """``pthread_cond_timedwait`` until `end`, nanoseconds of the condition's clock; 0, or ``ETIMEDOUT``."""

    def code(context, builder, signature, arguments):
        condition, mutex, end = arguments
        time, second = cgutils.alloca_once(builder, _WORD, size=2), ir.Constant(_WORD, 1_000_000_000)
        builder.store(builder.sdiv(end, second), time)
        builder.store(builder.srem(end, second), builder.gep(time, [ir.Constant(_INT, 1)]))
        return _call(builder, "pthread_cond_timedwait", _INT, [condition, mutex, time])

    return types.int32(types.int64, types.int64, types.int64), code
