"""Memory of NDArrays, for functions in the engine; and pinned memory, from which copies to GPUs run beside all else."""

from __future__ import annotations

import collections
import ctypes
import threading

import numpy as np

from ..compat import mx

_BUFFERS = 2  # for each device and dtype: one is filled while the other one's copy may still be under way


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
_reorder = getattr(mx.base._LIB, "_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv", None)


def make_plain(*arrays: mx.nd.NDArray) -> None:
    """Queue operators after which `arrays`, dense ones, are in the plain (row-major) memory layout, where they are.

    What a convolution on a CPU returns lies in oneDNN's blocked layout; asking for its memory inside the engine would
    wait for ever. MXNet's operators reorder only some arrays in place, so this is a method of its C++ class.
    """
    for array in arrays:
        if _reorder is not None and array.ctx.device_type != "gpu" and array.ndim > 1 and array.size:
            _reorder(array.handle)


class _Buffer:
    def __init__(self) -> None:
        self.lock = threading.Lock()  # of its own: to fill it waits for its last copy, on which no other device depends
        self.array: mx.nd.NDArray | None = None  # made when it is needed


_buffers: collections.defaultdict[tuple[mx.Context, np.dtype], collections.deque[_Buffer]] = collections.defaultdict(
    lambda: collections.deque(_Buffer() for _ in range(_BUFFERS))
)  # (device, dtype) -> buffers, the next one first
_lock = threading.Lock()  # of this dict and its deques


def pinned_memory(device: mx.Context) -> mx.Context | None:
    """The context of the host memory that copies to `device` should start from; None if any memory is as good."""
    return mx.cpu_pinned(0) if device.device_type == "gpu" else None


def copy_to_device(array: np.ndarray, device: mx.Context, memory: mx.Context) -> mx.nd.NDArray:
    """A NumPy array on `device`, through a buffer in `memory` that is used again; MXNet alone would wait for the copy.

    It returns when `array`, of at least one axis and one value, has been read. It waits only if the copy before the
    last one to this device is not through. `memory` is that of :func:`pinned_memory`.
    """
    with _lock:
        buffers = _buffers[device, np.dtype(array.dtype)]
        buffer = buffers[0]
        buffers.rotate()
    with buffer.lock, mx.autograd.pause():
        if buffer.array is None or buffer.array.size < array.size:  # to lock pages takes time, so some more of them
            buffer.array = mx.nd.empty(1 << (array.size - 1).bit_length(), memory, array.dtype)
        staged = buffer.array[: array.size].reshape(array.shape)
        staged[:] = array
        return staged.copyto(device)
