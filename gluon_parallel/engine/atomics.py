"""Atomic machine words, clocks, and C functions called by name or address, for code without Python's lock."""

# Whoever imports this file pays half a second for Numba.

import ctypes
import functools
import hashlib
import warnings
from pathlib import Path

import numba
import numpy as np
from llvmlite import binding, ir
from numba import carray, types
from numba.extending import intrinsic

from ..compat import mx

WORD = 8  # bytes
MONOTONIC, PROCESSOR = 1, 3  # clocks: CLOCK_MONOTONIC, CLOCK_THREAD_CPUTIME_ID
_WORD, _i64 = ir.IntType(64), types.int64

# All files with compiled functions, and with the records that they read. What a function calls in other files is kept
# with it on disk, and Numba would not notice that one of those has changed; so their text is a part of the name that it
# keeps the function by.
_PACKAGE = Path(__file__).parent.parent
_KINDS = ("engine/atomics.py", "kvstore/flight_recorder/layout.py", "kvstore/flight_recorder/compiled_*.py",
          "kvstore/mpi/shared_memory/layout.py", "kvstore/mpi/shared_memory/compiled_*.py",
          "nn/sync_batch_norm/operator*.py", "nn/sync_batch_norm/rendezvous.py",
          "nn/sync_batch_norm/compiled/*.py")  # fmt: skip
SOURCES = [str(path.relative_to(_PACKAGE)) for kind in _KINDS for path in sorted(_PACKAGE.glob(kind))]
_VERSION = hashlib.sha256(b"".join((_PACKAGE / name).read_bytes() for name in SOURCES)).hexdigest()[:12]


def compiled(signature, make=numba.njit, **options):
    """Compile a function for `signature` (or each of a list) now, and keep the code on disk where that is possible."""

    def decorate(function):
        function.__qualname__ = f"{function.__qualname__}_{_VERSION}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", numba.errors.NumbaWarning)  # a cache that cannot be written is no matter
            try:
                return make(signature, cache=True, error_model="numpy", **options)(function)
            except RuntimeError:  # no folder that compiled code may be kept in: compile anew in each process
                return make(signature, error_model="numpy", **options)(function)

    return decorate


def define(name, function):
    """Let compiled code call `function`, a ctypes function that lives on, by that name."""
    binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)


def c_function(name, num_arguments):
    """A function of so many words that returns an ``int``; looked up when code is loaded, which may be kept on disk."""
    return types.ExternalFunction(name, types.int32(*[types.int64] * num_arguments))


def mxnet_function(name, num_arguments):
    """The same for one of MXNet's C API."""
    define(name, getattr(mx.base._LIB, name))
    return c_function(name, num_arguments)


def _instruction(result, *kinds):
    """An operation on arguments of these types, from a function that builds it in LLVM's code."""

    def decorate(function):
        def operation(_typing, *_arguments):
            def code(context, builder, _signature, arguments):
                made = function(builder, *arguments)
                return context.get_dummy_value() if result == types.void else made

            return result(*kinds), code

        return intrinsic(functools.wraps(function)(operation))  # Numba counts the arguments after the first

    return decorate


def _pointer(builder, address):
    return builder.inttoptr(address, _WORD.as_pointer())


@_instruction(_i64, _i64)
def load(builder, address):
    """The word at `address`; what was written before it was stored is seen after it was loaded."""
    return builder.load_atomic(_pointer(builder, address), ordering="seq_cst", align=8)


@_instruction(types.void, _i64, _i64)
def store(builder, address, value):
    """The word at `address` becomes `value`; what was written before is seen by whoever loads it."""
    builder.store_atomic(value, _pointer(builder, address), ordering="seq_cst", align=8)


@_instruction(types.boolean, _i64, _i64, _i64)
def exchange_if(builder, address, expected, value):
    """The word at `address` becomes `value` if it is `expected`; whether it was."""
    return builder.extract_value(builder.cmpxchg(_pointer(builder, address), expected, value, ordering="seq_cst"), 1)


@_instruction(_i64, _i64, _i64)
def add(builder, address, value):
    """Add `value` to the word at `address`; returns what it was."""
    return builder.atomic_rmw("add", _pointer(builder, address), value, ordering="seq_cst")


@_instruction(types.int32, _i64, _i64, _i64, _i64)
def call(builder, function, first, second, third):
    """Call the C function at that address with three words; its result is an ``int``."""
    kind = ir.FunctionType(ir.IntType(32), [_WORD] * 3)
    return builder.call(builder.inttoptr(function, kind.as_pointer()), (first, second, third))


@_instruction(types.voidptr, _i64)
def pointer(builder, address):
    """`address` as ``carray`` wants it."""
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


@_instruction(_i64, types.voidptr)
def address(builder, where):
    """A C pointer as a number."""
    return builder.ptrtoint(where, _WORD)


@compiled(types.int64(types.int64, types.int64))
def get(record, number):
    """The word of that number in the record at that address."""
    return load(record + number * WORD)


@compiled(types.void(types.int64, types.int64, types.int64))
def put(record, number, value):
    """Set it."""
    store(record + number * WORD, value)


@compiled(types.float64[::1](types.int64, types.int64))
def vector(where, size):
    """(size,) float64 at that address."""
    return carray(pointer(where), size, np.float64)


@compiled(types.int64[::1](types.int64, types.int64))
def words(where, size):
    """(size,) int64 at that address."""
    return carray(pointer(where), size, np.int64)


_clock_gettime = c_function("clock_gettime", 2)


@compiled(types.int64(types.int64))
def now(clock):
    """Nanoseconds of a clock."""
    time = np.empty(2, np.int64)  # timespec: seconds, nanoseconds
    _clock_gettime(clock, time.ctypes.data)
    return time[0] * 1_000_000_000 + time[1]
