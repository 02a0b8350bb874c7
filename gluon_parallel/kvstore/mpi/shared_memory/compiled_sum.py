"""Compiled sums of arrays at addresses."""

from mmap import MADV_DONTNEED, MADV_HUGEPAGE, PAGESIZE

import numpy as np
from numba import carray, types

from ....engine.compiled.access import pointer, words
from ....engine.compiled.functions import c_function, compiled
from .layout import DTYPES, WORTH

_BLOCK = 8192  # values of a sum that stay in the cache
_madvise, _memcpy = c_function("madvise", 3), c_function("memcpy", 3)
_i64 = types.int64


def _sum_of(name):
    """:func:`sum_arrays` for one dtype."""
    dtype = getattr(np, name)

    def function(sources, offset, num, out, first_value, size):
        target, addresses = carray(pointer(out), size, dtype), words(sources, num)
        for begin in range(first_value, size, _BLOCK):
            end = min(begin + _BLOCK, size)
            block = target[begin:end]
            first = carray(pointer(addresses[0] + offset), size, dtype)[begin:end]
            if num == 1:
                for i in range(block.size):
                    block[i] = first[i]
                continue
            second = carray(pointer(addresses[1] + offset), size, dtype)[begin:end]
            for i in range(block.size):
                block[i] = first[i] + second[i]
            for number in range(2, num):
                other = carray(pointer(addresses[number] + offset), size, dtype)[begin:end]
                for i in range(block.size):
                    block[i] += other[i]

    return compiled(types.void(*[_i64] * 6))(function)


_sum_float32, _sum_float64, _sum_int32 = map(_sum_of, DTYPES)


@compiled(types.void(*[_i64] * 7))
def sum_parts(dtype, sources, offset, num, out, begin, end):
    """The values from `begin` to `end` of the array at `out` become the sums of those of `num` others.

    The addresses of the others, less `offset` bytes, stand from `sources` on.
    """
    if dtype == 0:
        _sum_float32(sources, offset, num, out, begin, end)
    elif dtype == 1:
        _sum_float64(sources, offset, num, out, begin, end)
    else:
        _sum_int32(sources, offset, num, out, begin, end)


@compiled(types.void(_i64, _i64, _i64, _i64, _i64))
def sum_arrays(dtype, sources, num, out, size):
    """The array at `out` becomes the sum of `num` others, whose addresses stand from `sources` on."""
    sum_parts(dtype, sources, 0, num, out, 0, size)


@compiled(types.void(_i64, _i64, _i64, _i64, _i64))
def copy_part(dtype, source, out, begin, end):
    """The values from `begin` to `end` of the array at `out` become those of the array at `source`."""
    size = 8 if dtype == 1 else 4
    _memcpy(out + begin * size, source + begin * size, (end - begin) * size)


@compiled(types.void(_i64, _i64, _i64, _i64))
def release(dtype, array, begin, end):
    """Give the memory of these values of an array back to the system, as far as it is whole pages: they become zero."""
    size = 8 if dtype == 1 else 4
    first = -(-(array + begin * size) // PAGESIZE) * PAGESIZE
    num_bytes = (array + end * size) // PAGESIZE * PAGESIZE - first
    if num_bytes >= WORTH - PAGESIZE:
        _madvise(first, num_bytes, MADV_HUGEPAGE)  # the backward pass gets it back page by page: the fewer, the faster
        _madvise(first, num_bytes, MADV_DONTNEED)


@compiled(types.void(_i64, _i64, _i64))
def spoil(dtype, out, size):
    """The array at `out` becomes NaN, or 0 where there is no NaN, so that no program trains on with half a sum."""
    num_bytes = size * (8 if dtype == 1 else 4)
    carray(pointer(out), num_bytes, np.uint8)[:] = 0 if dtype == 2 else 0xFF  # a NaN: all bits of a float are 1
