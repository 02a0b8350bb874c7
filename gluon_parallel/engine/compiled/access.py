"""Access of compiled code to memory: records and arrays at addresses, and atomic operations on records' fields."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
from llvmlite import ir
from numba import carray, from_dtype, types
from numba.core.typing import Signature
from numba.extending import intrinsic

from .functions import SECOND, c_function, compiled, instruction, two_words
from .records import Record

WORD = 8  # bytes
_WORD, _i64 = ir.IntType(64), types.int64


def record_type(kind: type[Record]) -> Any:
    """Numba's type of such a record, for signatures."""
    return from_dtype(np.dtype(kind))


def record_at(kind: type[Record]) -> Callable[..., Any]:
    """A function for compiled code: the record of that kind at an address."""

    @instruction(record_type(kind), _i64)
    def at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        return builder.inttoptr(address, ir.ArrayType(ir.IntType(8), ctypes.sizeof(kind)).as_pointer())

    return at


@instruction(types.voidptr, _i64)
def pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """An address as ``carray`` wants it."""
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


@instruction(_i64, None)
def address(builder: ir.IRBuilder, memory: ir.Value) -> ir.Value:
    """The address of a record, or a C pointer, as a number."""
    return builder.ptrtoint(memory, _WORD)


def _field_operation(result: types.Type) -> Callable[[Callable[..., ir.Value]], Any]:
    """An operation on a field of a record, named by a literal; the decorated function emits it in LLVM."""

    def decorate(emit: Callable[..., ir.Value]) -> Any:
        def operation(_typing: Any, record: types.Record, field: types.Type, *values: types.Type) -> Any:
            if not isinstance(field, types.StringLiteral):
                return None
            offset = record.offset(field.literal_value)

            def code(context: Any, builder: ir.IRBuilder, _signature: Signature, given: Sequence[ir.Value]) -> Any:
                where = builder.add(builder.ptrtoint(given[0], _WORD), ir.Constant(_WORD, offset))
                made = emit(builder, builder.inttoptr(where, _WORD.as_pointer()), None, *given[2:])
                return context.get_dummy_value() if result == types.void else made

            return result(record, field, *[_i64] * len(values)), code

        # Numba counts the arguments after the first.
        return intrinsic(prefer_literal=True)(functools.wraps(emit)(operation))

    return decorate


@_field_operation(_i64)
def address_of_field(builder: ir.IRBuilder, word: ir.Value, _field: None) -> ir.Value:
    """The address of the field of that name of a record."""
    return builder.ptrtoint(word, _WORD)


@_field_operation(_i64)
def load(builder: ir.IRBuilder, word: ir.Value, _field: None) -> ir.Value:
    """The field of that name of a record; what was written before it was stored is seen after it was loaded."""
    return builder.load_atomic(word, ordering="seq_cst", align=8)


@_field_operation(types.void)
def store(builder: ir.IRBuilder, word: ir.Value, _field: None, value: ir.Value) -> None:
    """The field becomes `value`; what was written before is seen by threads that load it."""
    builder.store_atomic(value, word, ordering="seq_cst", align=8)


@_field_operation(types.boolean)
def exchange_if(builder: ir.IRBuilder, word: ir.Value, _field: None, expected: ir.Value, value: ir.Value) -> ir.Value:
    """The field becomes `value` if it is `expected` (compare and swap); returns whether it was."""
    return builder.extract_value(builder.cmpxchg(word, expected, value, ordering="seq_cst"), 1)


@_field_operation(_i64)
def add(builder: ir.IRBuilder, word: ir.Value, _field: None, value: ir.Value) -> ir.Value:
    """Add `value` to the field; returns what it was."""
    return builder.atomic_rmw("add", word, value, ordering="seq_cst")


@compiled(types.float64[::1](_i64, _i64))
def vector(where: int, size: int) -> np.ndarray:
    """(size,) float64 at that address."""
    return carray(pointer(where), size, np.float64)


@compiled(types.int64[::1](_i64, _i64))
def words(where: int, size: int) -> np.ndarray:
    """(size,) int64 at that address."""
    return carray(pointer(where), size, np.int64)


_pthread_cond_timedwait, _clock_gettime = c_function("pthread_cond_timedwait", 3), c_function("clock_gettime", 2)


@compiled(_i64(_i64))
def now(clock: int) -> int:
    """Nanoseconds of a clock."""
    time = two_words()  # timespec: seconds, nanoseconds
    _clock_gettime(clock, time)
    seconds, nanoseconds = words(time, 2)
    return seconds * SECOND + nanoseconds


@compiled(types.int32(_i64, _i64, _i64))
def wait_until(condition: int, mutex: int, end: int) -> int:
    """Wait for the condition until `end`, nanoseconds of its clock; returns 0, or ``ETIMEDOUT``."""
    time = two_words()
    words(time, 2)[0], words(time, 2)[1] = end // SECOND, end % SECOND
    return _pthread_cond_timedwait(condition, mutex, time)
