"""Check of stores and layers that are made again and again: they use the shared memory of those that nobody holds."""

import gc
import time

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.kvstore.collective import gather
from mxnet import autograd, nd

NUM = 1 << 17  # values: half a megabyte


def in_use(store):
    """Bytes of the shared memory that stores and layers have, whoever holds them."""
    shared = store._progress.shared
    with shared._lock:
        return shared._used - sum(size for _, size in shared._spare)


def check_shared_memory_of_stores_and_layers_that_nobody_holds_is_used_again(store):
    """Also of other sizes, where a process holds a store for longer, and with the sums of new stores."""
    held, most = [], 0
    gc.collect()
    gather(store, "the end of a trial", np.zeros(1))  # what it has stays
    before = in_use(store)  # also what a check before this one let go of, until all processes have agreed on it
    for trial in range(6):
        made = gp.kvstore.create("mpi")
        value = nd.arange(NUM >> trial % 3) * (made.rank + 1 + trial)
        whole = value.asnumpy() / (made.rank + 1 + trial) * sum(range(trial + 1, trial + 1 + made.num_workers))
        for _ in range(3):
            array = value.copy()
            made.pushpull("weight", array)
            np.testing.assert_allclose(array.asnumpy(), whole, rtol=1e-6, atol=0)  # float32
        layer = gp.nn.SyncBatchNorm(in_channels=4096, kvstore=store)
        layer.initialize()
        x = nd.ones((2, 4096)) * store.rank
        with autograd.record():
            y = layer(x)
        y.backward()
        if store.num_workers == 2:
            np.testing.assert_allclose(y.asnumpy(), 2 * store.rank - 1, rtol=1e-3, atol=0)  # the epsilon of 1e-5
        mx.nd.waitall()
        held = [made] if store.rank == trial % 2 else []  # the others hold theirs no more
        del made, layer, x, y
        gc.collect()
        gather(store, "the end of a trial", np.array([trial], float))
        most = max(most, in_use(store))
    del held
    gc.collect()
    # It is free when all processes have agreed that nobody holds it, soon after the last one has let go of it.
    allowed = min(before, most - (NUM << 2))  # the trials used half a megabyte or more
    until = time.monotonic() + 60
    while in_use(store) > allowed and time.monotonic() < until:
        time.sleep(0.01)
    assert in_use(store) <= allowed
