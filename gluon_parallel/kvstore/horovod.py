"""The store ``horovod``: sums this process's devices, and processes by Horovod."""

from __future__ import annotations

import importlib

import numpy as np

from ..allreduce import allreduce, broadcast, sum_arrays
from ..compat.array_types import as_legacy
from ..errors import SparseUnsupported, StoreUnavailable
from . import heartbeat
from .base import Store, as_list
from .environment import refuse_if_alone
from .handshake import SAME_MODEL, SAME_VERSIONS, agree, described, version

_INSTALL = (
    "HOROVOD_WITH_MXNET=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 pip install --no-build-isolation horovod==0.28.1 "
    "(a compiler and cmake are needed)"
)


def _horovod():
    try:
        return importlib.import_module("horovod.mxnet")
    except ImportError as error:
        raise StoreUnavailable(
            f"the store 'horovod' needs Horovod built for MXNet ({error}): {_INSTALL}; or choose mpi or dist_sync"
        ) from error


class Horovod(Store):
    """A store for ``gluon.Trainer`` over Horovod, which knows one array per process: all its devices' sum goes there.

    Raises:
        StoreUnavailable: Horovod is missing, was built without MXNet, or does not see the processes that this one was
            started with.
        WorkersDiffer: another process runs other versions; raised on all of them.
        WorkerLost: another process does not answer within ``GLUON_PARALLEL_TIMEOUT``.
    """

    def __init__(self):
        self._horovod = _horovod()
        heartbeat.send("arrived")
        self._horovod.init()
        refuse_if_alone("horovod", self._horovod.size(), "Horovod")
        self._agreed: set = set()  # what all processes send under a key, in words
        agree(self, self._start_sum, "run", [version()], SAME_VERSIONS)

    @property
    def type(self):
        """``"horovod"``."""
        return "horovod"

    @property
    def rank(self):
        """This process's number, from 0."""
        return self._horovod.rank()

    @property
    def num_workers(self):
        """How many processes take part."""
        return self._horovod.size()

    def broadcast(self, key, value, out, priority=0):
        """Every array in `out`, in every process, becomes rank 0's `value`.

        Raises:
            WorkersDiffer: another process sends another shape or dtype, or under another key; raised on all of them.
            WorkerLost: another process sends nothing within ``GLUON_PARALLEL_TIMEOUT``.
        """
        value, *outs = map(as_legacy, (value, *as_list(out)))
        _check(key, [value, *outs])
        if not self._agreed.issuperset(described([key], [value])):
            self.compare([key], [value])
        if outs[0] is not value:
            value.copyto(outs[0])
        self._horovod.broadcast_(outs[0], root_rank=0, name=f"broadcast {key}", priority=priority)
        broadcast(outs)

    def pushpull(self, key, value, out=None, priority=0):
        """Every array in `out`, in every process, becomes the sum of all processes' `value` arrays.

        Raises:
            SparseUnsupported: an array is not dense.
        """
        values = [as_legacy(array) for array in as_list(value)]
        outs = values if out is None else [as_legacy(array) for array in as_list(out)]
        _check(key, [*values, *outs])
        if outs is not values:
            total = sum_arrays(values)
            if total is not outs[0]:
                total.copyto(outs[0])
        elif len(values) > 1:
            allreduce(values, priority)
        self._horovod.allreduce_(outs[0], average=False, name=str(key), priority=priority)
        broadcast(outs)

    def compare(self, keys, arrays):
        """Refuse processes that are about to send other arrays under these keys; all of them call it.

        Raises:
            WorkersDiffer, WorkerLost: as :meth:`broadcast`.
        """
        words = described(keys, arrays)
        agree(self, self._start_sum, "send", words, SAME_MODEL)
        self._agreed.update(words)

    def set_gradient_compression(self, compression_params):
        """Refused: Horovod would have to be told at every exchange."""
        raise ValueError(
            f"compression_params={compression_params!r}: the store 'horovod' does not compress; leave it out, or take "
            "the store mpi"
        )

    def _start_sum(self, name, array):
        self._horovod.allreduce_(array, average=False, name=f"gluon_parallel {name}", priority=0)


def _check(key, arrays):
    for array in arrays:
        if array.stype != "default":
            raise SparseUnsupported(
                f"store 'horovod', key {key}: the {np.dtype(array.dtype).name} array on {array.ctx} is "
                f"{array.stype}; only dense arrays are summed. Build the layer with sparse_grad=False, or use dist_sync"
            )
