"""Memory of an array, on a GPU or not, as an address for MPI."""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from ....compat import mx

_NOT_A_NUMBER = 0xFF  # every byte of it, in float16, float32 and float64


def cuda_runtime() -> Any:
    """The CUDA runtime that MXNet itself has loaded, for ctypes; None if it has none, or hides it.

    Another copy would not do: which GPU is current is told to one of them.
    """
    library = mx.base._LIB  # what is looked up here is looked up in the libraries that it needs as well
    return library if hasattr(library, "cudaSetDevice") else None


def _check(name: str, status: int) -> None:
    if status != 0:
        raise RuntimeError(f"CUDA: {name} returned {status}")


@contextlib.contextmanager
def on_gpu(number: int, cuda: Any) -> Iterator[None]:
    """Within this block that GPU is current on this thread, as an MPI wants it that is handed memory there.

    Afterwards it is the one that was: some threads that move messages are MXNet's own. RuntimeError: CUDA refuses.
    """
    before = ctypes.c_int()
    _check("cudaGetDevice", cuda.cudaGetDevice(ctypes.byref(before)))
    _check("cudaSetDevice", cuda.cudaSetDevice(number))
    try:
        yield
    finally:
        if before.value != number:
            _check("cudaSetDevice", cuda.cudaSetDevice(before.value))


class Memory:
    """The memory of a dense array in the plain layout, on any device; keeps the array alive.

    Only inside a function that was pushed into MXNet's engine with `array`. MXNet waits for a GPU's stream at the end
    of every operator, so what was computed before is there, and what is computed afterwards finds what MPI has written.
    """

    def __init__(self, array: Any) -> None:
        pointer = ctypes.c_void_p()
        mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
        self._array = array
        self._address = pointer.value or 0
        self._itemsize = np.dtype(array.dtype).itemsize

    def part(self, begin: int, end: int) -> Any:
        """The values from `begin` up to `end`, of the array laid out flat, as a buffer for MPI."""
        from mpi4py import MPI  # here: whoever has no MPI uses the other stores

        return MPI.memory.fromaddress(self._address + begin * self._itemsize, (end - begin) * self._itemsize)

    def spoil(self) -> None:
        """Fill all of it with NaN."""
        size = self._array.size * self._itemsize
        if self._array.ctx.device_type == "gpu":
            cuda = cuda_runtime()
            with contextlib.suppress(RuntimeError), on_gpu(self._array.ctx.device_id, cuda):
                # Not checked, and that is suppressed: this is done after a failure, which says more.
                cuda.cudaMemset(ctypes.c_void_p(self._address), _NOT_A_NUMBER, ctypes.c_size_t(size))
                cuda.cudaDeviceSynchronize()
        else:
            ctypes.memset(self._address, _NOT_A_NUMBER, size)
