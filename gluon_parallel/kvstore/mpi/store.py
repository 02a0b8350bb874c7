"""The store ``mpi``: sums over this process's devices and over processes, while the backward pass goes on."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np

from ...allreduce import sum_rows
from ...compat import mx
from ...compat.array_types import to_device
from ...engine import make_plain, make_weights_plain, push_async, view
from ...errors import ArrayMismatch, SparseUnsupported
from ..base import Store, as_list
from ..handshake import SAME_MODEL, described, differ, spelled, words_of
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

    Args:
        timeout: seconds without a sign of life from a process that is waited for; by default the environment's
            ``GLUON_PARALLEL_TIMEOUT``, or 60. The limit of the process, not of the store: the last one set counts.

    Raises:
        StoreUnavailable: mpi4py or MPI is missing, or MPI does not see the processes that this one was started with.
        WorkerLost: a process does not open the store in time.
        WorkersDiffer: other versions run elsewhere.
    """

    def __init__(self, timeout=None):
        self._progress = progress_engine(timeout)
        self._number = next(_numbers)
        self._compressor = _PLAIN
        self._forms: dict = {}
        self._known: dict = {}  # key -> its sums in shared memory, of keys that were summed there
        self._cuda_allreduce = self._progress.cuda_allreduce

    @property
    def type(self):
        """``"mpi"``."""
        return "mpi"

    @property
    def rank(self):
        """This process's number, from 0."""
        return self._progress.rank

    @property
    def num_workers(self):
        """How many processes take part."""
        return self._progress.size

    @property
    def direct_from(self):
        """Bytes from which on sums are handed to MPI where the arrays are, GPUs included; None if MPI cannot.

        The same on all processes. Smaller arrays, and all if it is None, travel through host memory.
        """
        return None if self._cuda_allreduce is None else self._cuda_allreduce.size_from

    def broadcast(self, key, value, out, priority=0):
        """Every array in `out`, in every process, becomes rank 0's `value`.

        Args:
            key: a number or a name; or a list of them, with lists of the others.
            value: NDArray, or one per device, of which the first counts.
            out: NDArray or list of NDArrays.
            priority: a higher one starts earlier.
        """
        if isinstance(key, (list, tuple)):
            for one in zip(key, value, out):
                self.broadcast(*one, priority)
            return
        outs = as_list(out)
        self._start("b", key, as_list(value)[:1], outs, priority)

    def pushpull(self, key, value, out=None, priority=0):
        """Every array in `out`, in every process, becomes the sum of all processes' `value` arrays.

        Args:
            key: a number or a name; or a list of them, with lists of the others.
            value: NDArray, or one NDArray per device.
            out: the same; by default `value`.
            priority: a higher one starts earlier.

        Raises:
            SparseUnsupported: an array is not dense.
            ArrayMismatch: arrays of this process differ in shape or dtype.
            WorkerLost, WorkersDiffer: an earlier exchange has failed.
        """
        if isinstance(key, (list, tuple)):
            for index, one in enumerate(key):
                self.pushpull(one, value[index], None if out is None else out[index], priority)
            return
        values = value if isinstance(value, (list, tuple)) else (value,)
        outs = values if out is None else out if isinstance(out, (list, tuple)) else (out,)
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

    def shared_gather(self, key, vector):
        """Where :meth:`gather` goes through shared memory, for compiled code; None if it does not."""
        if self._progress.shared is None:
            return None
        names = self._names("m", key, vector)[0], self._names("g", key, vector)[0]
        return self._progress.shared.gathers(names, vector)

    def compare(self, keys, arrays):
        """Refuse processes that are about to send other arrays under these keys; all of them call it.

        Raises:
            WorkersDiffer: another process says something else; on every process, with the first array that differs.
            WorkerLost: another process does not call it within the limit.
        """
        words = described(keys, arrays)
        digests = self.gather("compared", np.frombuffer(hashlib.sha256("; ".join(words).encode()).digest(), np.uint8))
        if (digests == digests[0]).all():
            return
        for item in itertools.chain(words, itertools.repeat("nothing more")):
            said = self.gather("compared words", words_of(item))
            if (said != said[0]).any():
                raise differ(self.type, "send", dict(enumerate(map(spelled, said))), SAME_MODEL)

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
            note = self._compressor_of(key).note if kind == "s" else ""
            form = f"{np.dtype(array.dtype).name} {tuple(array.shape)}{note}"
            known = (array.shape, array.dtype), f"{self._number}{kind}:{key}".encode(), form.encode()
            self._forms[kind, key] = known
        return known[1:]

    def _compressor_of(self, key):
        """What encodes that key's arrays. Counts travel as they are: rounded they would be others."""
        return _PLAIN if isinstance(key, int) and key >= FIRST_COUNT else self._compressor

    def _start(self, kind, key, values, outs, priority):
        self._progress.check()
        _check(key, values, outs)
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
        (make_weights_plain if kind == "b" else make_plain)(*values, *outs)
        name, form = self._names(kind, key, outs[0])
        begin = self._begin_broadcast if kind == "b" else self._begin_sum

        def ready(done):
            memories = [view(array).reshape(-1) for array in outs]
            sources = [view(array).reshape(-1) for array in values]

            def end(error):
                if error is None:
                    for memory in memories[1:]:
                        np.copyto(memory, memories[0])
                else:  # nobody must train on with half a sum
                    for memory in memories:
                        memory.fill(np.nan if memory.dtype.kind == "f" else 0)
                done(error)

            self._progress.submit(begin(name, form, key, sources, memories[0], end))

        push_async(ready, read=values, write=outs, name=f"gluon_parallel.mpi {key}", priority=priority)

    def _start_cuda(self, key, values, outs, priority):
        """From the devices' memory, if MPI takes it and the arrays are worth it."""
        if self._cuda_allreduce is None or self._compressor_of(key).note or not self._cuda_allreduce.takes(outs[0]):
            return False
        names = [self._names(kind, key, outs[0])[0] for kind in "pqsa"]
        form = self._names("p", key, outs[0])[1]
        values, outs = ([array.as_nd_ndarray() for array in arrays] for arrays in (values, outs))
        self._cuda_allreduce.sum(names[:2], form, values, outs, names[2:], priority)
        return True

    def _start_shared(self, key, values, outs, priority):
        """Through shared memory, if all processes have it and the arrays allow it."""
        if self._progress.shared is None or self._compressor_of(key).note:
            return False
        names = [self._names(kind, key, outs[0])[0] for kind in "asp"]
        found = self._progress.shared.sums(tuple(names), outs[0])
        if found is None:
            return False
        make_plain(*values, *outs)
        self._known[key] = found
        found.push(values, outs, priority)
        return True

    def _begin_broadcast(self, name, form, key, sources, out, end):
        if self.rank == 0 and sources[0].ctypes.data != out.ctypes.data:
            np.copyto(out, sources[0])
        return Broadcast(name, form, end, out)

    def _begin_sum(self, name, form, key, sources, out, end):
        if len(sources) > 1:
            sum_rows(sources, [out])
        elif sources[0].ctypes.data != out.ctypes.data:
            np.copyto(out, sources[0])
        if self.num_workers == 1:
            return Gather(name, form, end, out)
        how = self._compressor_of(key)
        encoded = how.encode(key, out)
        if how.bits or encoded.nbytes <= INSIDE:
            exchange = Gather(name, form, None, encoded)

            def add(error):
                if error is None:
                    sum_rows([how.decode(row, out) for row in exchange.rows], [out])
                end(error)

            exchange.finish = add
            return exchange

        def widen(error):
            if error is None and encoded is not out:
                np.copyto(out, how.decode(encoded, out))
            end(error)

        return Sum(name, form, widen, encoded)


def _check(key, values, outs):
    first = values[0]
    for array in (*values, *outs):
        if array.stype != "default":
            raise SparseUnsupported(
                f"store 'mpi', key {key}: the array on {array.ctx} is {array.stype}; only dense arrays are summed. "
                "Build the layer with sparse_grad=False, or use dist_sync"
            )
        if array.shape != first.shape or array.dtype != first.dtype:
            raise ArrayMismatch(
                f"store 'mpi', key {key}: {np.dtype(array.dtype).name} {array.shape} on {array.ctx}, but "
                f"{np.dtype(first.dtype).name} {first.shape} on {first.ctx}; a key's arrays must be alike"
            )
