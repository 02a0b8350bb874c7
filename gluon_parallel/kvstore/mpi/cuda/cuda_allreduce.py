"""Sums on the devices: MXNet's operators add up a process's arrays there, and MPI the processes'."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....allreduce import sum_arrays
from ....compat import mx
from ....engine import make_plain, push_async
from ..agreement import key_of
from ..operations import Operation, allreduce
from .device_memory import Memory, cuda_runtime, on_gpu

if TYPE_CHECKING:
    from ..progress_engine import ProgressEngine

DTYPES = ("float16", "float32", "float64")  # which have a NaN


class CudaAllreduce:
    """Sums of large arrays over the processes of `progress`, without passing through host memory.

    One GPU of a process talks to MPI, the first that comes here; arrays of its other GPUs are added on that one, in an
    array of the key's own, float32 for halves. Arrays must have `size_from` bytes.
    """

    def __init__(self, progress: ProgressEngine, size_from: int) -> None:
        self._progress, self.size_from = progress, size_from
        self._gpu: Any = None
        self._known: dict = {}  # (name, form) -> the array that MPI sums, the operation

    def takes(self, array: Any) -> bool:
        """Whether an array like this is summed here; the same on every process for the same array."""
        name = np.dtype(array.dtype).name
        size = array.size * np.dtype(array.dtype).itemsize
        return name in DTYPES and size >= self.size_from and array.size >= self._progress.size

    def sum(self, name: bytes, form: bytes, values: Sequence[Any], outs: Sequence[Any], priority: int) -> None:
        """The arrays `outs` become the sum of all processes' `values`; returns at once.

        Args:
            name, form: of the key, as the progress engine knows them.
            values, outs: dense NDArrays of one shape and dtype.
            priority: a higher one starts earlier.
        """
        home = self._home(values, outs)
        make_plain(*values, *outs)
        with mx.autograd.pause():
            total, operation = self._known.get((name, form)) or self._make(name, form, outs[0], home)

            failed: list = []

            def ready(done: Callable[..., None]) -> None:
                def finish(error: Exception | None) -> None:
                    failed.extend(filter(None, [error]))
                    done(error)

                operation.call(lambda: None, finish)

            def spoil(done: Callable[..., None]) -> None:
                """Nobody must train on with half a sum."""
                for out in outs if failed else ():
                    Memory(out).spoil()
                done()

            own = sum_arrays([value.reshape((-1,)).as_in_context(home) for value in values])
            own.astype(total.dtype, copy=False).copyto(total)
            # On a worker for the CPU: those for GPUs have a stream to keep busy.
            title = f"gluon_parallel.mpi {key_of(name)}"
            push_async(ready, [], [total], mx.cpu(), title, priority)
            for out in outs:
                total.reshape(out.shape).astype(out.dtype, copy=False).copyto(out)
            push_async(spoil, [total], outs, mx.cpu(), title, priority, always=True)

    def _make(self, name: bytes, form: bytes, array: Any, home: Any) -> tuple[Any, Operation]:
        dtype = "float32" if np.dtype(array.dtype) == np.float16 else np.dtype(array.dtype).name
        total = mx.nd.zeros(array.size, home, dtype)
        total.wait_to_read()
        memory = Memory(total)
        kind = self._progress.mpi.FLOAT if dtype == "float32" else self._progress.mpi.DOUBLE
        operation = allreduce(self._progress.everyone, name, form, [memory.part(0, array.size), kind])
        self._known[name, form] = total, operation
        return self._known[name, form]

    def _home(self, values: Sequence[Any], outs: Sequence[Any]) -> Any:
        """The device on which this process adds: its GPU, if one is concerned."""
        gpus = [array.ctx for array in (*values, *outs) if array.ctx.device_type == "gpu"]
        if not gpus:
            return values[0].ctx
        if self._gpu is None:
            self._gpu = gpus[0]
            self._progress.around = functools.partial(on_gpu, self._gpu.device_id, cuda_runtime())
        return self._gpu
