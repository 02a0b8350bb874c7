"""The store ``mpi``: sums over this process's devices and over processes, while the backward pass goes on."""

import itertools
from typing import Any

import numpy as np

from ...allreduce import sum_rows
from ...compat import mx
from ...compat.array_types import to_device
from ...engine import make_plain, push_async, view
from ..base import Store
from ..flight_recorder import RECORDER
from ..reserved_keys import FIRST_COUNT
from .collectives import INSIDE, Broadcast, Gather, Sum
from .compression import compressor
from .startup import progress_engine

_numbers = itertools.count()
_PLAIN = compressor({"type": "none"})


class MPI(Store):
    """A store for ``gluon.Trainer`` that meets the other processes over MPI.

    Stores are made in the same order in every process. Keys are numbers or names; they meet by key, in whatever order
    the processes come to them. Every call returns at once; who reads the arrays waits. A failure is raised where an
    array of an exchange that it ended is waited for, and by every later call.

    Attributes:
        direct_from: bytes from which on sums are handed to MPI where the arrays are, GPUs included; the same on all
            processes. Smaller arrays travel through host memory; all do if it is None, because MPI cannot.

    Raises:
        StoreUnavailable: mpi4py or MPI is missing, or MPI does not see the processes that this one was started with.
        WorkerLost: a process does not open the store within ``GLUON_PARALLEL_TIMEOUT``, or 60, seconds.
        WorkersDiffer: other versions run elsewhere.
    """

    type = "mpi"

    def __init__(self):
        self._progress = progress_engine()
        self.rank, self.num_workers = self._progress.rank, self._progress.size
        self._number = next(_numbers)
        self._compressor = _PLAIN
        self._forms: dict = {}
        self._known: dict = {}  # key -> its sums in shared memory, of keys that were summed there
        self._cuda_allreduce = self._progress.cuda_allreduce
        self.direct_from = None if self._cuda_allreduce is None else self._cuda_allreduce.size_from

    def _broadcast(self, key, value, outs, priority):
        self._start("b", key, [value], outs, priority)

    def _sum(self, key, values, outs, priority):
        known = self._known.get(key)
        if known is None or not known.push_again(values, outs, priority):
            self._start("s", key, values, outs, priority)

    def gather(self, key, vector):
        """Every process's `vector`, by rank; waits for all. What a layer's statistics take: no array, no engine.

        Args:
            key: a number or a name, used for nothing else.
            vector: (n,) NumPy array, of one length and dtype everywhere.

        Returns:
            (num_workers, n) NumPy array.
        """
        vector = np.ascontiguousarray(vector)
        shared = self.shared_gather(key, vector)
        if shared is not None:
            return shared.gather(vector)
        name, form = self._names("g", key, vector)
        return self._progress.gather(name, form, vector)

    _gather_numbers = gather

    def shared_gather(self, key, vector):
        """Where :meth:`gather` goes through shared memory, for compiled code; None if it does not."""
        if self._progress.shared is None:
            return None
        names = self._names("m", key, vector)[0], self._names("g", key, vector)[0]
        return self._progress.shared.gathers(names, vector)

    def describe(self, key, text):
        """Name the layer or parameter of a key, for the flight recorder; before the key is used."""
        RECORDER.describe(self._number, key, text)

    def set_gradient_compression(self, compression_params):
        """Send gradients in fewer bits from now on; the same on every process.

        Args:
            compression_params: ``{"type": "fp16"}``, ``{"type": "bf16"}``, or MXNet's
                ``{"type": "2bit", "threshold": 0.5}``: what is below the threshold stays behind in a residual, and is
                sent when it has grown. Numbers of samples and of what else the processes count are never compressed.
        """
        self._compressor = compressor(compression_params)
        self._known.clear()
        self._forms.clear()

    # ------------------------------------------------------------------

    def _names(self, kind, key, array):
        known = self._forms.get((kind, key))
        if known is None or known[0] != (array.shape, array.dtype):
            note = self._compressor_of(key, array).note if kind == "s" else ""
            form = f"{np.dtype(array.dtype).name} {tuple(array.shape)}{note}"
            known = (array.shape, array.dtype), f"{self._number}{kind}:{key}".encode(), form.encode()
            self._forms[kind, key] = known
        return known[1:]

    def _compressor_of(self, key, array):
        """What encodes that key's arrays. Counts travel as they are: rounded they would be others."""
        is_count = isinstance(key, int) and key >= FIRST_COUNT
        return _PLAIN if is_count or not self._compressor.takes(np.dtype(array.dtype)) else self._compressor

    def _start(self, kind, key, values, outs, priority):
        self._progress.check()
        self._check(key, [*values, *outs])
        if kind == "s" and self._start_cuda(key, values, outs, priority):
            return
        if all(array.ctx.device_type != "gpu" for array in (*values, *outs)):
            self._start_on_host(kind, key, values, outs, priority)
            return
        # Through host memory; the copies are operators, so they too begin when their array is ready.
        staged = [to_device(value, mx.cpu()) for value in values]
        result = staged[0] if staged[0] is not values[0] else staged[0].copy()
        self._start_on_host(kind, key, staged, [result], priority)
        for out in outs:
            result.copyto(out)

    def _start_on_host(self, kind, key, values, outs, priority):
        if kind == "s" and self._start_shared(key, values, outs, priority):
            return
        make_plain(*values, *outs)
        name, form = self._names(kind, key, outs[0])

        def ready(done):
            out, *copies = [view(array).reshape(-1) for array in outs]
            sources = [view(array).reshape(-1) for array in values]

            def end(error):
                if error is not None:  # nobody must train on with half a sum
                    out.fill(np.nan if out.dtype.kind == "f" else 0)
                for copy in copies:
                    np.copyto(copy, out)
                done(error)

            if len(sources) > 1:
                sum_rows(sources, [out])
            elif sources[0].ctypes.data != out.ctypes.data:
                np.copyto(out, sources[0])
            collective = Broadcast(name, form, end, out) if kind == "b" else self._sum_of(name, form, key, out, end)
            self._progress.submit(collective)

        push_async(ready, read=values, write=outs, name=f"gluon_parallel.mpi {key}", priority=priority)

    def _start_cuda(self, key, values, outs, priority):
        """From the devices' memory, if MPI takes it and the arrays are worth it."""
        cuda = self._cuda_allreduce
        if cuda is None or self._compressor_of(key, outs[0]).note or not cuda.takes(outs[0]):
            return False
        names = [self._names(kind, key, outs[0])[0] for kind in "pqsa"]
        form = self._names("p", key, outs[0])[1]
        values, outs = ([array.as_nd_ndarray() for array in arrays] for arrays in (values, outs))
        cuda.sum(names[:2], form, values, outs, names[2:], priority)
        return True

    def _start_shared(self, key, values, outs, priority):
        """Through shared memory, if all processes have it and the arrays allow it."""
        if self._progress.shared is None or self._compressor_of(key, outs[0]).note:
            return False
        names = [self._names(kind, key, outs[0])[0] for kind in "asp"]
        found = self._progress.shared.sums(tuple(names), outs[0])
        if found is None:
            return False
        make_plain(*values, *outs)
        self._known[key] = found
        found.push(values, outs, priority)
        return True

    def _sum_of(self, name, form, key, out, end):
        if self.num_workers == 1:
            return Gather(name, form, end, out)
        how = self._compressor_of(key, out)
        encoded = how.encode(key, out)
        in_parts = not how.bits and encoded.nbytes > INSIDE
        collective: Any = (Sum if in_parts else Gather)(name, form, None, encoded)

        def finish(error):
            if error is None:  # after one there may be no rows
                rows = [encoded] if in_parts else collective.rows
                if rows[0] is not out:
                    sum_rows([how.decode(row, out) for row in rows], [out])
            end(error)

        collective.finish = finish
        return collective
