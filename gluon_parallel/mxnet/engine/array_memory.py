"""Memory of NDArrays, for functions in the engine."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..compat import mx


def view(array: mx.nd.NDArray) -> np.ndarray:
    """The memory of a dense CPU array as a NumPy array, without a copy.

    Only inside a function that was pushed with `array`, after ``array.wait_to_read()``, or for a new array that the
    engine has not been given yet; and only for an array in the plain layout: gradient buffers always are, others after
    :func:`make_plain`.
    """
    pointer = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    dtype = np.dtype(array.dtype)
    if array.size == 0:
        return np.empty(array.shape, dtype)
    memory = (ctypes.c_char * (array.size * dtype.itemsize)).from_address(pointer.value)
    return np.frombuffer(memory, dtype).reshape(array.shape)


# NDArray::Reorder2DefaultAsync() const; a build without oneDNN has neither the function nor other layouts.
_reorder: Any = getattr(mx.base._LIB, "_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv", None)


def make_plain(*arrays: mx.nd.NDArray) -> None:
    """Queue operators after which `arrays`, dense ones, are in the plain (row-major) memory layout, where they are.

    What a convolution on a CPU returns lies in oneDNN's blocked layout; asking for its memory inside the engine would
    wait for ever. MXNet's operators reorder only some arrays in place, so this is a method of its C++ class.
    """
    reorder(filter(may_be_blocked, arrays))


def may_be_blocked(array: mx.nd.NDArray) -> bool:
    """Whether a dense array may be in one of oneDNN's layouts, now or later."""
    return _reorder is not None and array.ctx.device_type != "gpu" and array.ndim > 1 and array.size > 0


def reorder(arrays: Iterable[mx.nd.NDArray]) -> None:
    """:func:`make_plain` of arrays that :func:`may_be_blocked` has chosen."""
    for array in arrays:
        _reorder(array.handle)
