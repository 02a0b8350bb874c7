"""Faults while MPI takes sums from the arrays' own memory: ``python cuda_faults.py store fault``."""

import functools
import os
import signal
import sys

import numpy as np
from cuda_checks import Cuda
from kvstore_faults import leave

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.kvstore.mpi.cuda import device_memory
from mxnet import nd


def refused(store):
    """CUDA does not let a thread use the GPU: everybody is told, and nobody waits."""
    array = nd.ones(1000)
    store.pushpull("first", array)
    array.wait_to_read()
    if store.rank == 0:
        cuda = Cuda()
        cuda.cudaSetDevice = lambda number: 101
        store._progress.around = functools.partial(device_memory.on_gpu, 3, cuda)
    told(store, array, "cudaSetDevice returned 101")


def across(store):
    """The last process sends an array that is so small that it takes another way."""
    array = nd.ones(1000 if store.rank < store.num_workers - 1 else 10)
    if os.environ.get("KNOWN"):  # the small one has worked before
        array, before = nd.ones(10), array
        store.pushpull("second", array)
        array.wait_to_read()
        array = before
    told(store, array, "float32 (10,)", "float32 (1000,)")


def killed(store):
    """The last process is killed while the others wait for its part."""
    array = nd.ones(100_000)
    store.pushpull("first", array)
    array.wait_to_read()
    if store.rank == store.num_workers - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    store.pushpull("second", array)
    array.wait_to_read()


def told(store, array, *words):
    try:
        store.pushpull("second", array)
        array.wait_to_read()
        for _ in range(2):
            store.pushpull("third", nd.ones(1))
            mx.nd.waitall()
    except (gp.errors.WorkersDiffer, gp.errors.WorkerLost) as error:
        assert all(word in str(error) for word in ("second", *words[1:])) or words[0] in str(error), error
        assert np.isnan(array.asnumpy()).all()
        leave("refused")
    raise AssertionError("nobody noticed")


if __name__ == "__main__":
    globals()[sys.argv[2]](gp.kvstore.create(sys.argv[1]))
