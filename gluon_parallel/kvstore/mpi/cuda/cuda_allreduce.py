"""Allreduce on the devices: MPI moves the parts of an array, MXNet's operators add them."""

import collections
import functools

import numpy as np

from ....allreduce import sum_arrays
from ....compat import mx
from ....engine import make_plain, push_async
from ....split import share
from ..collectives import Swap
from ..pending import key_of
from .device_memory import Memory, cuda_runtime, on_gpu

DTYPES = ("float16", "float32", "float64")  # which have a NaN


class CudaAllreduce:
    """Sums of large arrays over the processes of `progress`, without passing through host memory.

    Each process adds up one part of the array: it gets that part from all others, adds in rank order, and sends the
    result to all. So everyone gets the same bits, and they are those that the other ways to sum give. One GPU of a
    process talks to MPI, the first that comes here; arrays of its other GPUs are added on that one. Arrays must have
    `size_from` bytes.
    """

    def __init__(self, progress, size_from):
        self._progress, self.size_from = progress, size_from
        self._gpu = None
        self._turns: dict = collections.defaultdict(lambda: mx.nd.zeros(1, mx.cpu()))  # by key, what it takes turns by

    def takes(self, array):
        """Whether an array like this is summed here; the same on every process for the same array."""
        name = np.dtype(array.dtype).name
        size = array.size * np.dtype(array.dtype).itemsize
        return name in DTYPES and size >= self.size_from and array.size >= self._progress.size

    def sum(self, names, form, values, outs, elsewhere, priority):
        """The arrays `outs` become the sum of all processes' `values`; returns at once.

        Args:
            names: two of the key, as the progress engine knows them, for the parts and for the results.
            form, elsewhere: see :class:`.Collective`.
            values, outs: dense NDArrays of one shape and dtype.
            priority: a higher one starts earlier.
        """
        progress, home = self._progress, self._home(values, outs)
        make_plain(*values, *outs)
        # Both exchanges write to it: so the engine keeps what is pushed at one key in the program's order.
        turn = self._turns[names[0]]
        parts = [share(outs[0].size, rank, progress.size) for rank in range(progress.size)]
        begin, end = parts[progress.rank]
        step = end - begin
        first_succeeded = False

        def push(name, source, target, outgoing, incoming):
            """Queue an exchange: parts of `source` by rank, as (begin, end), for parts of `target`."""
            is_second = source is target

            def ready(done):
                sent, received = Memory(source), Memory(target)

                def finish(error, _kept=(sent, received)):  # alive as long as the exchange is, also after a failure
                    nonlocal first_succeeded
                    first_succeeded = error is None
                    if error is not None:
                        received.spoil()
                    done(error)

                if is_second and not first_succeeded:
                    received.spoil()  # nobody must train on with half a sum
                    done()  # the array has failed already
                    return
                out = [sent.part(*bounds) for bounds in outgoing]
                into = [received.part(*bounds) for bounds in incoming]
                progress.submit(Swap(name, form, finish, out, into, elsewhere))

            # On a worker for the CPU: those for GPUs have a stream to keep busy.
            title = f"gluon_parallel.mpi {key_of(name)}"
            push_async(ready, [source], [target, turn], mx.cpu(), title, priority, always=is_second)

        with mx.autograd.pause():
            source = sum_arrays([value.reshape((-1,)).as_in_context(home) for value in values])
            rows = mx.nd.empty(progress.size * step, home, source.dtype)
            places = [(rank * step, rank * step + step) for rank in range(progress.size)]
            push(names[0], source, rows, parts, places)
            terms = [rows[place:stop] for place, stop in places]
            terms[progress.rank] = source[begin:end]
            out = outs[0] if outs[0].context == home else mx.nd.empty(outs[0].shape, home, outs[0].dtype)
            try:
                sum_arrays(terms).copyto(out.reshape((-1,))[begin:end])
                push(names[1], out, out, [(begin, end)] * progress.size, parts)
            except BaseException:
                for array in outs:  # nobody must train on with half a sum
                    array[:] = np.nan
                raise
            for array in outs:
                if array is not out:
                    out.copyto(array)

    def _home(self, values, outs):
        """The device on which this process adds: its GPU, if one is concerned."""
        gpus = [array.ctx for array in (*values, *outs) if array.ctx.device_type == "gpu"]
        if not gpus:
            return values[0].ctx
        if self._gpu is None:
            self._gpu = gpus[0]
            self._progress.around = functools.partial(on_gpu, self._gpu.device_id, cuda_runtime())
        return self._gpu
