"""Atomic machine words, clocks, and C functions called by address, for code that runs without Python's lock."""

# mypy: ignore-errors
# Numba reads these functions, Python never runs them. Whoever imports this file pays half a second for Numba.

import hashlib
import warnings
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic as _intrinsic

intrinsic: Any = _intrinsic  # whose functions take one argument less than they say
WORD = 8  # bytes
MONOTONIC, PROCESSOR = 1, 3  # clocks: CLOCK_MONOTONIC, CLOCK_THREAD_CPUTIME_ID
_WORD = ir.IntType(64)

# All files with compiled functions, and with the records that they read. What a function calls in other files is kept
# with it on disk, and Numba would not notice that one of those has changed; so their text is a part of the name that it
# keeps the function by.
_PACKAGE = Path(__file__).parent.parent
_KINDS = ("engine/atomics.py", "kvstore/flight_recorder/layout.py", "kvstore/flight_recorder/compiled_*.py",
          "kvstore/mpi/shared_memory/layout.py", "kvstore/mpi/shared_memory/compiled_*.py",
          "nn/sync_batch_norm/operator_*.py", "nn/sync_batch_norm/rendezvous.py",
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


def _pointer(builder, address):
    return builder.inttoptr(address, _WORD.as_pointer())


@intrinsic
def load(typing, address):
    """The word at `address`; what was written before it was stored is seen after it was loaded."""

    def code(context, builder, signature, arguments):
        return builder.load_atomic(_pointer(builder, arguments[0]), ordering="seq_cst", align=8)

    return types.int64(types.int64), code


@intrinsic
def store(typing, address, value):
    """The word at `address` becomes `value`; what was written before is seen by whoever loads it."""

    def code(context, builder, signature, arguments):
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0]), ordering="seq_cst", align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def exchange_if(typing, address, expected, value):
    """The word at `address` becomes `value` if it is `expected`; whether it was."""

    def code(context, builder, signature, arguments):
        address, expected, value = arguments
        pair = builder.cmpxchg(_pointer(builder, address), expected, value, ordering="seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), code


@intrinsic
def add(typing, address, value):
    """Add `value` to the word at `address`; returns what it was."""

    def code(context, builder, signature, arguments):
        return builder.atomic_rmw("add", _pointer(builder, arguments[0]), arguments[1], ordering="seq_cst")

    return types.int64(types.int64, types.int64), code


def _call(builder, function, result, arguments):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)


@intrinsic
def call(typing, function, first, second, third):
    """Call the C function at that address with three words; its result is an ``int``."""

    def code(context, builder, signature, arguments):
        return _call(builder, arguments[0], ir.IntType(32), arguments[1:])

    return types.int32(types.int64, types.int64, types.int64, types.int64), code


@intrinsic
def system_call(typing, function, number, a, b, c, d):
    """Call libc's ``syscall`` at that address."""

    def code(context, builder, signature, arguments):
        zero = ir.Constant(_WORD, 0)
        return _call(builder, arguments[0], _WORD, [*arguments[1:], zero, zero])

    return types.int64(*[types.int64] * 6), code


@intrinsic
def pointer(typing, address):
    """`address` as ``carray`` wants it."""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), code


@intrinsic
def address(typing, where):
    """A C pointer as a number."""

    def code(context, builder, signature, arguments):
        return builder.ptrtoint(arguments[0], _WORD)

    return types.int64(types.voidptr), code


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


_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int64, types.int64))


@compiled(types.int64(types.int64))
def now(clock):
    """Nanoseconds of a clock."""
    time = np.empty(2, np.int64)  # timespec: seconds, nanoseconds
    _clock_gettime(clock, time.ctypes.data)
    return time[0] * 1_000_000_000 + time[1]
