"""Pinned host memory: copies from it to a GPU run beside everything else, and nobody waits for them.

From a NumPy array MXNet copies to a GPU at once, and the program waits until it is there.
"""

from __future__ import annotations

import collections
import threading

import numpy as np

from ..compat import mx

_BUFFERS = 2  # for each device and dtype: one is filled while the other one's copy may still be under way


class _Buffer:
    """A buffer, made when it is needed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # of its own: to fill it waits for its last copy, on which no other device depends
        self.array: mx.nd.NDArray | None = None


_buffers: collections.defaultdict[tuple[mx.Context, np.dtype], collections.deque[_Buffer]] = collections.defaultdict(
    lambda: collections.deque(_Buffer() for _ in range(_BUFFERS))
)  # (device, dtype) -> buffers, the next one first
_lock = threading.Lock()  # of this dict and its deques


def pinned_memory(device: mx.Context) -> mx.Context | None:
    """The context of the host memory that copies to `device` should start from; None if any memory is as good."""
    return mx.cpu_pinned(0) if device.device_type == "gpu" else None


def copy_to_device(array: np.ndarray, device: mx.Context, memory: mx.Context) -> mx.nd.NDArray:
    """A NumPy array on `device`, through a buffer in `memory` that is used again.

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
