"""A training that loses processes in chosen states: ``python survival.py FILE FOLDER MOMENT:NUMBER:STEP...``.

Process NUMBER kills itself when it comes to MOMENT in step STEP. Process 0, or who takes its place, writes the weights
to FILE, and its run to FOLDER. Without the last words it is the undisturbed training.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import simulated_hosts

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.allreduce import gradients
from mxnet import gluon, nd

NUM_EPOCHS, SAMPLES, BATCH = 3, 22, 6  # four batches each, of which the last one has 4 samples
TRAINING = None
LOSSES = {}  # moment -> step, of this process


def lose(moment):
    """End this process if it shall be lost here."""
    if TRAINING is not None and TRAINING.num_steps >= LOSSES.get(moment, np.inf):
        if moment == "host":
            Path(f"{sys.argv[1]}.{TRAINING.rank}").touch()  # now the test takes the host away
        while moment in ("hang", "host"):
            pass
        os.kill(os.getpid(), signal.SIGSTOP if moment == "stop" else signal.SIGKILL)


def lost_in(moment, owner, name, behind=False):
    """Have a function end this process, before it does anything or behind that."""
    function = getattr(owner, name)

    def replaced(*arguments, **options):
        if not behind:
            lose(moment)
        result = function(*arguments, **options)
        lose(moment)
        return result

    setattr(owner, name, replaced)


class Data(gluon.data.ArrayDataset):
    def __getitem__(self, number):
        lose("data")
        return super().__getitem__(number)


def late_behind_the_sums(step):
    """In that step this process has all sums, and hears of the loss before it updates: others have updated."""
    wait = gradients.wait

    def waited(parameters):
        wait(parameters)
        until = time.monotonic() + 60
        while TRAINING.num_steps == step and not gp.kvstore.has_failed(TRAINING.store):
            assert time.monotonic() < until, "no process was lost"
            time.sleep(0.01)

    gradients.wait = waited


def make_net():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(5, in_units=3), gluon.nn.BatchNorm(in_channels=5), gluon.nn.Activation("tanh"))
    net.add(gluon.nn.Dense(4, in_units=5), gluon.nn.BatchNorm(in_channels=4), gluon.nn.Dense(2, in_units=4))
    net.cast("float64")
    net.initialize(ctx=gp.devices("cpu:1"))
    random = np.random.RandomState(0)
    for parameter in net.collect_params().values():
        if parameter.name.endswith(("weight", "bias")):
            parameter.set_data(nd.array(random.standard_normal(parameter.shape), dtype="float64"))
    return net


def main(file, folder, *losses):
    global TRAINING
    simulated_hosts.simulate()
    net, random = make_net(), np.random.RandomState(1)
    data = random.standard_normal((SAMPLES, 3)), random.randint(0, 2, SAMPLES).astype("float64")
    data = Data(*(nd.array(array, dtype="float64") for array in data))
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    TRAINING, train, test = gp.prepare(
        net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, gluon.data.DataLoader(data, BATCH, shuffle=True),
        gluon.data.DataLoader(data, 8, shuffle=True), sync_batch_norm=True, run=gp.Run(folder),
    )  # fmt: skip
    for word in losses:
        moment, number, step = word.split(":")
        if int(number) == TRAINING.rank:
            LOSSES[moment] = int(step)
            if moment == "late":
                late_behind_the_sums(int(step))
    lost_in("forward", net[5], "forward")  # the statistics of the first layers are under way
    lost_in("sum", gradients, "wait")
    lost_in("stop", gradients, "wait")
    lost_in("hang", gradients, "wait")
    lost_in("host", gradients, "wait")
    lost_in("update", trainer, "update", behind=True)
    lost_in("evaluation", mx.metric.Accuracy, "update")
    lost_in("saving", gp.archive, "write")
    for _ in TRAINING.epochs(NUM_EPOCHS):
        for x, y in train:
            TRAINING.step(x, y)
        [(_, accuracy)] = TRAINING.evaluate(test, "acc")
        TRAINING.end_epoch(accuracy=accuracy)
    outputs = TRAINING.predict(test)
    gp.check_replicas(net, TRAINING.store)
    if TRAINING.is_main:
        weights = [parameter.data().asnumpy() for parameter in net.collect_params().values()]
        np.savez(file, outputs, accuracy, *weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
