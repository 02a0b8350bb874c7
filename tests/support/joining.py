"""A training whose processes end at chosen steps, while others join in their place."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.kvstore.environment import joins
from mxnet import gluon

SAMPLES, BATCH = 24, 6
NUM_WORKERS = int(os.environ.get("GLUON_PARALLEL_NUM_WORKERS", 1))


def make_net():
    mx.random.seed(3)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(5, activation="tanh", in_units=3), gluon.nn.BatchNorm(in_channels=5))
    net.add(gluon.nn.Dense(2, in_units=5))
    net.cast("float64")
    net.initialize(mx.init.Xavier())
    return net


def make_data():
    random = np.random.default_rng(1)
    arrays = random.standard_normal((SAMPLES, 3)), random.integers(0, 2, SAMPLES).astype("float64")
    return gluon.data.ArrayDataset(*(mx.nd.array(array, dtype="float64") for array in arrays))


def weights_of(net):
    return {name: one.data().asnumpy() for name, one in net._collect_params_with_prefix().items()}


def signal_at(step, orders, number):
    """Get the signal that ``orders`` name for the process of that number in that step: ``number:step:signal``."""
    for word in orders:
        who, when, name = word.split(":")
        if (int(who), int(when)) == (number, step):
            os.kill(os.getpid(), getattr(signal, name))


def main(file, folder, kind, epochs, *orders):
    net, data, epochs = make_net(), make_data(), int(epochs)
    store = gp.kvstore.create("auto")
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, kvstore=store)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    train = gluon.data.DataLoader(data, BATCH, shuffle=True)
    orders = [word for word in orders if word]
    number = int(os.environ.get("GLUON_PARALLEL_RANK", 0))
    if joins() is not None:
        signal_at(-1, orders, number)
    average = gp.ExponentialMovingAverage(net, decay=0.9)
    if kind == "prepare":
        training, train = gp.prepare(
            net, loss, trainer, train, store=store, sync_batch_norm=True, run=folder, saved={"average": average}
        )
        step, loop = training.step, training.epochs(epochs)
    else:
        gp.nn.convert_sync_batchnorm(net, kvstore=store)
        parallel = gp.DataParallel(net, loss, trainer)
        training, train = gp.survive(parallel.step, net, trainer, train)
        step, loop = training, training.epochs(epochs)
    print(f"begins at step {training.num_steps}", flush=True)
    sizes = []
    for _ in loop:
        for x, y in train:
            signal_at(training.num_steps, orders, number)
            step(x, y)
            if kind == "prepare":
                average.update()
            sizes.append(store.num_workers)
            missing = NUM_WORKERS - store.num_workers
            time.sleep(0.3 if missing else 0.0)  # so that a process has the time to start before the training ends
        if kind == "prepare":
            training.end_epoch(score=0.5)
    gp.check_replicas(net, store)
    print(f"ends with {store.num_workers} processes", flush=True)
    if store.rank == 0:
        weights = weights_of(net)
        if kind == "prepare":
            with average.applied():
                weights.update({f"average {name}": array for name, array in weights_of(net).items()})
        np.savez(file, **weights)
        Path(file + ".sizes").write_text(repr(sizes))


if __name__ == "__main__":
    main(*sys.argv[1:])
