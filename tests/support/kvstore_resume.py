"""Trains a net with SyncBatchNorm; as a script one process of several, from one checkpoint to the next."""

import sys

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.commands import parity


def build(devices, store=None):
    """(net, trainer, parallel step), initialised with other weights in every process."""
    task = parity.make("sync_batch_norm", store)
    gp.reseed(3 if store is None else 3 + store.rank)
    task.net.initialize(mx.init.Xavier(), ctx=devices)
    task.net.cast("float64")
    options = {"learning_rate": 0.05, "momentum": 0.9}  # Adam would blow up the rounding of gradients that are zero
    trainer = mx.gluon.Trainer(task.net.collect_params(), "sgd", options, kvstore=store, update_on_kvstore=False)
    return task, trainer, gp.DataParallel(task.net, task.loss, trainer, devices)


def train(task, step, numbers, store=None):
    """The steps of these numbers, this process's share of each batch."""
    rank, num_workers = (0, 1) if store is None else (store.rank, store.num_workers)
    for number in numbers:
        x, y = task.batch(15, np.random.default_rng(number))
        mine = parity.shard_slice(15, rank, num_workers, number)
        if mine.stop > mine.start:
            step(mx.nd.array(x[mine], dtype="float64"), mx.nd.array(y[mine], dtype="float64"))
        else:
            step(x[mine], y[mine])  # an empty share is that of a process that has run out: step(None)


if __name__ == "__main__":
    name, before, after = sys.argv[1:]
    contexts = gp.devices("cpu:2")
    kvstore = gp.kvstore.create(name)
    task, trainer, step = build(contexts, kvstore)
    if before != "-":
        gp.checkpoint.restore(gp.archive.read(before), task.net, trainer)
    train(task, step, range(2, 5) if before != "-" else range(2), kvstore)
    state = gp.checkpoint.state(task.net, trainer)
    for key, array in sorted(state.arrays.items()):
        rows = gp.metrics.gather_rows(array.reshape(1, -1), kvstore)
        assert (rows == rows[0]).all(), f"{key} differs between the processes"
    if kvstore.rank == 0:
        gp.archive.write(after, state.arrays, state.facts)
    print("wrote" if kvstore.rank == 0 else "left the writing to process 0")
