"""Processes that call different functions, run as ``python collective_checks.py store check``."""

import re
import sys

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

DEVICES = gp.devices("cpu:1")
APART = "Process 0 has called training.mean_loss(), and process 1 has not. Every process must call it"


def make(store):
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize(ctx=DEVICES)
    data = gluon.data.ArrayDataset(nd.arange(5).reshape((5, 1)), nd.arange(5).reshape((5, 1)))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    return gp.prepare(net, gluon.loss.L2Loss(), trainer, gluon.data.DataLoader(data, 4), store=store)


def train(training, num_steps):
    for number in range(num_steps):
        training.step(nd.full((2, 1), 1 + training.store.rank + number), nd.ones((2, 1)))
    nd.waitall()


def check_others_call_another_function(store):
    """All hear at once which function each has called, and can go on."""
    training, loader = make(store)
    train(training, 2)
    try:
        if store.rank == 0:
            training.mean_loss()
        training.evaluate(loader, gluon.loss.L2Loss())
    except gp.errors.WorkersDiffer as error:
        words = r"process 0 calls training.mean_loss\(\) with \d+ values, process 1 calls training.evaluate\(\) with "
        assert re.search(words, str(error)), error
    else:
        raise AssertionError("nobody noticed")
    [(_, value)] = training.evaluate(loader, "mse")
    assert value >= 0
    try:
        gp.evaluate(training.net, [], ["acc"] * (1 + store.rank), DEVICES, store)
    except gp.errors.WorkersDiffer as error:
        words = "process 0 calls gp.evaluate() with 4 values, process 1 calls gp.evaluate() with 8 values. Every"
        assert words in str(error), error
    else:
        raise AssertionError("nobody noticed")
    assert gp.metrics.gather_rows(np.arange(100 * store.rank), store).tolist() == list(range(100))  # several messages


def check_others_go_on_with_steps(store):
    """The process that waits in the function, and those that wait for its next step, name the function."""
    training, _ = make(store)
    train(training, 2)
    try:
        if store.rank == 0:
            training.mean_loss()
        train(training, 2)
    except (gp.errors.WorkerLost, mx.base.MXNetError) as error:  # the latter where the sum was waited for
        if APART in str(error):
            print("named the function")
        else:  # on a busy machine the other one may have ended with that error already
            assert f"Process {1 - store.rank} is gone" in str(error), error
    else:
        raise AssertionError("nobody noticed")


def check_others_end(store):
    """Who waits in the function names it, not the number of steps."""
    training, _ = make(store)
    train(training, 2)
    if store.rank == 0:
        try:
            training.mean_loss()
        except gp.errors.WorkerLost as error:
            assert "process 1 has ended its program. " + APART in str(error), error
            assert "number of steps" not in str(error), error
        else:
            raise AssertionError("nobody noticed")


def main():
    store = gp.kvstore.create(sys.argv[1])
    globals()[sys.argv[2]](store)
    print(f"passed {sys.argv[2]} on {store.rank}", flush=True)


if __name__ == "__main__":
    main()
