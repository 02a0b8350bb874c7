"""Allreduce on the devices: MPI moves the parts of an array, MXNet's operators add them."""

from __future__ import annotations

import functools

import numpy as np

from ....allreduce import sum_arrays
from ....compat import mx
from ....compat.array_types import as_legacy
from ....engine import make_plain, push_async
from ....split import share
from ..collectives import Swap
from .device_memory import Memory, cuda_runtime, on_gpu

DTYPES = ("float16", "float32", "float64")  # which have a NaN


class CudaAllreduce:
    """Sums of large arrays over the processes of `progress`, without passing through host memory.

    Each process adds up one part of the array: it gets that part from all others, adds in rank order, and sends the
    result to all. So everyone gets the same bits, and they are those that the other ways to sum give. One GPU of a
    process talks to MPI, the first that comes here; arrays of its other GPUs are added on that one.

    Args:
        progress: its exchanges go through it.
        size_from: bytes that an array must have.
    """

    def __init__(self, progress, size_from):
        self._progress, self.size_from = progress, size_from
        self._gpu = None
        self._turns: dict = {}  # key -> an array that says whose turn it is

    def takes(self, array):
        """Whether an array like this is summed here; the same on every process for the same array."""
        name = np.dtype(array.dtype).name
        size = array.size * np.dtype(array.dtype).itemsize
        return name in DTYPES and size >= self.size_from and array.size >= self._progress.size

    def sum(self, names, form, values, outs, elsewhere, priority):
        """The arrays `outs` become the sum of all processes' `values`; returns at once.

        Args:
            names: two of the key, as the progress engine knows them, for the parts and for the results.
            form: shape and dtype in words.
            values, outs: dense NDArrays of one shape and dtype.
            elsewhere: what else the progress engine may call this key, in processes that do not come here.
            priority: a higher one starts earlier.
        """
        progress, home = self._progress, self._home(values, outs)
        values, outs = [[as_legacy(array) for array in arrays] for arrays in (values, outs)]
        # Both exchanges write to it: so the engine keeps what is pushed at one key in the program's order.
        turn = self._turns.get(names[0])
        if turn is None:
            turn = self._turns[names[0]] = mx.nd.zeros(1, mx.cpu())
        make_plain(*(array for array in (*values, *outs) if array.ctx.device_type == "cpu"))
        size = outs[0].size
        parts = [share(size, rank, progress.size) for rank in range(progress.size)]
        begin, end = parts[progress.rank]
        step = end - begin
        push = functools.partial(self._push, form=form, turn=turn, elsewhere=elsewhere, priority=priority)
        with mx.autograd.pause():
            source = sum_arrays([value.reshape((-1,)).as_in_context(home) for value in values])
            rows = mx.nd.empty(progress.size * step, home, source.dtype)
            summed = _FirstExchange()
            push(
                names[0],
                summed,
                source,
                rows,
                parts,
                [(rank * step, rank * step + step) for rank in range(progress.size)],
            )
            terms = [rows[rank * step : rank * step + step] for rank in range(progress.size)]
            terms[progress.rank] = source[begin:end]
            out = outs[0] if outs[0].context == home else mx.nd.empty(outs[0].shape, home, outs[0].dtype)
            try:
                sum_arrays(terms).copyto(out.reshape((-1,))[begin:end])
                push(names[1], summed, out, out, [(begin, end)] * progress.size, parts)
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

    def _push(self, name, first, source, target, outgoing, incoming, form, turn, elsewhere, priority):
        """Queue an exchange: parts of `source` by rank, as (begin, end), for parts of `target`."""
        is_second = source is target

        def ready(done):
            memories = Memory(source), Memory(target)
            if is_second and not first.has_succeeded:
                memories[1].spoil()  # nobody must train on with half a sum
                done()  # the array has failed already
                return
            out = [memories[0].part(*bounds) for bounds in outgoing]
            into = [memories[1].part(*bounds) for bounds in incoming]
            # The arrays live as long as the exchange does, also after a failure.
            finish = functools.partial(_finish, done, first, *memories)
            self._progress.submit(Swap(name, form, finish, out, into, elsewhere))

        # On a worker for the CPU: those for GPUs have a stream to keep busy.
        title = f"gluon_parallel.mpi {name.decode().partition(':')[2]}"
        push_async(ready, [source], [target, turn], mx.cpu(), title, priority, always=is_second)


class _FirstExchange:
    """What the second exchange of a sum must know of the first one, which may have failed or never begun."""

    has_succeeded = False


def _finish(done, first, _sent, received, error):
    first.has_succeeded = error is None
    if error is not None:
        received.spoil()
    done(error)
