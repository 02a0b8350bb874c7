"""Memory of NDArrays, for functions in the engine."""

import ctypes

import numpy as np

from ..compat import mx
from ..compat.array_types import as_legacy
from ..device_threads.thread import thread_of


def view(array):
    """The memory of a dense CPU array as a NumPy array, without a copy.

    Only inside a function that was pushed with `array`, or after ``array.wait_to_read()``; and only for an array in
    the plain layout: gradient buffers always are, others after :func:`make_plain`.
    """
    pointer = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    dtype = np.dtype(array.dtype)
    if array.size == 0:
        return np.empty(array.shape, dtype)
    memory = (ctypes.c_char * (array.size * dtype.itemsize)).from_address(pointer.value)
    return np.frombuffer(memory, dtype).reshape(array.shape)


# NDArray::Reorder2DefaultAsync() const; a build without oneDNN has neither the function nor other layouts.
_reorder = getattr(mx.base._LIB, "_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv", None)


def make_plain(*arrays):
    """Queue operators after which `arrays`, dense CPU arrays, are in the plain (row-major) memory layout.

    What a convolution returns lies in oneDNN's blocked layout, and asking for its memory inside the engine would wait
    for ever. MXNet's reshape is the one operator that reorders in place; on an array that is plain it does nothing. It
    holds a temporary buffer until the array is ready, hence the thread.
    """
    legacy = [as_legacy(array) for array in arrays if array.ndim > 1 and array.size]
    if legacy:
        thread_of("plain layout")(lambda: [mx.nd.reshape(one, shape=one.shape, out=one) for one in legacy])


def make_weights_plain(*arrays):
    """The same for weights, after waiting for them: also of grouped convolutions, which ``reshape`` cannot reorder.

    This calls MXNet's C++ function, which would lose the exception of an array that has failed; hence the waiting.
    """
    for array in arrays:
        array.wait_to_read()
        if array.ndim > 1 and array.size and _reorder is not None:
            _reorder(array.handle)
