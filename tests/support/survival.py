"""A training that loses processes in chosen states: ``python survival.py FILE FOLDER KIND MOMENT:NUMBER:STEP...``.

KIND is a key of KINDS: the net and the loop. Process NUMBER is lost (killed, stopped, or in an endless loop) when it
comes to MOMENT in step STEP; at the moments ``late``, ``behind``, ``ended`` and ``error`` it is one of those that go
on. Process 0, or the one that takes its place, writes the weights to FILE and its run to FOLDER. Without
MOMENT:NUMBER:STEP no process is lost.
"""

import functools
import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import simulated_hosts

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.kvstore.mpi import python_sums
from gluon_parallel.kvstore.mpi import regrouping as mpi_regrouping
from gluon_parallel.kvstore.mpi.shared_memory import memory
from gluon_parallel.kvstore.mpi.shared_memory.memory import SharedMemory
from gluon_parallel.mxnet.engine.functions import one_error_at_a_time
from gluon_parallel.native import locked
from gluon_parallel.survive import regrouping, survival
from mxnet import gluon, nd

NUM_EPOCHS, SAMPLES, BATCH = 3, 22, 6  # four batches each, of which the last one has 4 samples
TRAINING = None  # what makes the steps
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
LOSSES = {}  # moment -> step, of this process


def lose(moment):
    """End this process if it shall be lost here."""
    if getattr(TRAINING, "num_steps", 0) >= LOSSES.get(moment, np.inf):
        if moment == "host":
            Path(f"{sys.argv[1]}.{os.environ['GLUON_PARALLEL_RANK']}").touch()  # now the test takes the host away
        while moment in ("hang", "host"):  # one that computes is waited for longer: it may draw curves
            time.sleep(1)
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


def late_behind_the_sums(store, step):
    """In that step this process has all sums, and hears of the loss before it updates: others have updated."""
    wait = survival.wait_for_gradients

    def waited(parameters):
        wait(parameters)
        until = time.monotonic() + 60
        while TRAINING.num_steps == step and not regrouping.has_failed(store):
            assert time.monotonic() < until, "no process was lost"
            time.sleep(0.01)

    survival.wait_for_gradients = waited


def go_on_behind_a_layer_that_has_failed(net, step):
    """In that step, the pass of the first SyncBatchNorm has failed before the second one's is launched."""
    first, second = (layer for layer in net if isinstance(layer, gluon.nn.BatchNorm))
    forward, has_failed = second.forward, False

    def late(*arguments):
        nonlocal has_failed
        until = time.monotonic() + 60
        while TRAINING.num_steps == step and not has_failed:
            has_failed = first.sync_group.rendezvous.failure is not None
            assert time.monotonic() < until, "no process was lost"
            time.sleep(0.01)
        return forward(*arguments)

    second.forward = late


def end_exchanges_late():
    """Sums that end just before a loss ends them fail only when this process has had time to wait for everything."""
    abandon, forget, has_waited = SharedMemory.abandon, regrouping.forget_failures, threading.Event()

    def abandoned(memory, error):
        ended = [exchange for exchange in memory._sums if not exchange.record.state]
        abandon(memory, error)
        has_waited.wait(1)
        for exchange in ended:
            exchange.fail(error)

    def forgotten():
        forget()
        has_waited.set()

    SharedMemory.abandon, regrouping.forget_failures = abandoned, forgotten


def raise_meanwhile():
    """While exchanges are ended, another thread has the mutex of errors, and waits for Python's lock."""
    look = SharedMemory.look

    def have_mutex(has_it):
        with locked(one_error_at_a_time):
            has_it.set()
            time.sleep(0.2)

    def looked(memory):
        if memory.host.failed:
            has_it = threading.Event()
            threading.Thread(target=have_mutex, args=(has_it,)).start()
            assert has_it.wait(60)
        look(memory)

    SharedMemory.look = looked


def make_net(deferred=False, sparse=False, has_values=True):
    """A net; if `deferred`, its layers are hybridized, and know their shapes from the first batch on.

    Without `has_values` they draw their weights then, too.
    """
    net, sizes = gluon.nn.HybridSequential(), dict.fromkeys("abc", 0) if deferred else {"a": 3, "b": 5, "c": 4}
    random = np.random.RandomState(0)
    if sparse:
        vectors = gluon.nn.Embedding(40, 3, sparse_grad=True, dtype="float64")
        net.add(vectors, gluon.nn.HybridLambda(lambda F, x: x.mean(axis=1)))
    net.add(gluon.nn.Dense(5, in_units=sizes["a"]), gluon.nn.BatchNorm(in_channels=sizes["b"]))
    net.add(gluon.nn.Activation("tanh"), gluon.nn.Dense(4, in_units=sizes["b"]))
    net.add(gluon.nn.BatchNorm(in_channels=sizes["c"]), gluon.nn.Dense(2, in_units=sizes["c"]))
    net.cast("float64")
    net.initialize(ctx=gp.devices("cpu:1"))
    if sparse:
        net[0].weight.set_data(nd.array(random.standard_normal((40, 3)), dtype="float64"))
    dense = [layer for layer in net if isinstance(layer, gluon.nn.Dense)]
    for layer, shape in zip(dense if has_values else (), ((5, 3), (4, 5), (2, 4))):
        layer.weight.set_data(nd.array(random.standard_normal(shape), dtype="float64"))
        layer.bias.set_data(nd.array(random.standard_normal(shape[0]), dtype="float64"))
    for layer in net[:5] if deferred else ():
        layer.hybridize()
    return net


class Prepared:
    """The loop of ``gp.prepare``, with these options."""

    def __init__(self, net, trainer, data, folder, loss=LOSS, **options):
        global TRAINING
        TRAINING, self.train, self.test = gp.prepare(
            net, loss, trainer, gluon.data.DataLoader(data, BATCH, shuffle=True),
            gluon.data.DataLoader(data, 8, shuffle=True), sync_batch_norm=True,
            run=gp.Run(folder, log_every=int(os.environ.get("LOG_EVERY", "2"))), train_metrics="acc", **options,
        )  # fmt: skip

    def epochs(self):
        for _ in TRAINING.epochs(NUM_EPOCHS):
            for x, y in self.train:
                TRAINING.step(x, y)
            [(_, accuracy)] = TRAINING.evaluate(self.test, "acc")
            TRAINING.end_epoch(accuracy=accuracy)
        return accuracy, TRAINING.predict(self.test)


class Own:
    """A loop of its own around ``gp.DataParallel``."""

    def __init__(self, net, trainer, data, folder):
        global TRAINING
        store = trainer._kvstore_params["kvstore"]
        gp.nn.convert_sync_batchnorm(net, kvstore=store)
        order = gp.sampler.BatchSampler(SAMPLES, BATCH, shuffle=True)
        train = gluon.data.DataLoader(data, batch_sampler=order.shard(store.rank, store.num_workers))
        test = gluon.data.DataLoader(data, 8, shuffle=True)
        self.net, self.trainer, self.data, self.file = net, trainer, data, folder + "/own.npz"
        self.store, self.other = store, gp.nn.SyncBatchNorm(in_channels=3, kvstore=store)
        self.other.initialize(ctx=gp.devices("cpu:1"))
        self.run_other()
        TRAINING, self.train, self.test = gp.survive(self.make_step(), net, trainer, train, test)

    def run_other(self):
        """Exchange statistics in a net that is not trained."""
        with mx.autograd.record():
            self.other(nd.ones((1, 3))).wait_to_read()

    def make_step(self):
        self.parallel = gp.DataParallel(self.net, LOSS, self.trainer)
        return lambda x, y: self.parallel.step(x * 1, y)  # changed behind the loader

    def epochs(self):
        for _ in range(NUM_EPOCHS):
            for x, y in self.train:
                TRAINING(x, y)
            [(_, accuracy)] = gp.evaluate(self.net, self.test, "acc", gp.devices("cpu:1"), self.store)
            gp.checkpoint.save(self.file, self.net, self.trainer)
        gp.checkpoint.load(self.file, self.net, self.trainer)
        self.run_other()
        return accuracy, self.net(self.data._data[0]).asnumpy()

    def refuses(self):
        """Updates that a loss could leave half done are refused on all processes."""
        batch = self.data._data[0] + self.store.rank, nd.array(self.data._data[1])  # equal ones would be warned of
        with pytest.raises(gp.errors.GradientUnavailable, match="the trainer updates outside of its step"):
            self.parallel.step(*batch)
        with pytest.raises(gp.errors.GradientUnavailable, match="the trainer updates twice in a step"):
            TRAINING.together(lambda: [self.parallel.step(*batch) for _ in range(2)])


class OwnTrainer(Own):
    """A loop of its own around ``gluon.Trainer``."""

    def make_step(self):
        def step(x, y):
            whole = 4 if TRAINING.num_steps % 4 == 3 else BATCH
            with mx.autograd.record():
                loss = LOSS(self.net(x), y)
            loss.backward()
            self.trainer.step(whole)
            return loss.mean()

        return step


def loss_of_pairs(z, y):
    """A loss of the whole batch: the classes, and how alike all pairs are."""
    return LOSS(z, y).mean() + 0.1 * nd.dot(z, z, transpose_b=True).square().mean()


KINDS = {
    "prepared": Prepared, "drawn": Prepared, "sparse": Prepared,
    "accumulated": functools.partial(Prepared, accumulate=3), "own": Own, "trainer": OwnTrainer,
    "over_batch": functools.partial(Prepared, loss=loss_of_pairs, loss_over="batch"),
}  # fmt: skip


def main(file, folder, kind, *losses):
    simulated_hosts.simulate()
    net, random = (
        make_net(kind in ("trainer", "drawn"), kind == "sparse", has_values=kind != "drawn"),
        np.random.RandomState(1),
    )
    inputs = random.randint(0, 40, (SAMPLES, 4)) if kind == "sparse" else random.standard_normal((SAMPLES, 3))
    data = inputs, random.randint(0, 2, SAMPLES).astype("float64")
    data = Data(*(nd.array(array, dtype="float64") for array in data))
    store = gp.kvstore.create("auto")
    # Process 0 sends its weights; process 1, which may take its place, has the same ones. Gluon's Trainer sends them
    # when the first gradients are there.
    if store.rank > 1 and kind not in ("trainer", "drawn"):
        for parameter in net.collect_params().values():
            parameter.set_data(parameter.data() + 1)
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, kvstore=store)
    for word in losses:
        moment, number, step = word.split(":")
        if int(number) == store.rank:
            LOSSES[moment] = int(step)
            if moment == "late":
                late_behind_the_sums(store, int(step))
            elif moment == "ended":
                end_exchanges_late()
            elif moment == "error":
                raise_meanwhile()
    lost_in("start", gp.Run, "share")
    lost_in("broadcast", trainer, "_init_params")
    lost_in("sum", survival, "wait_for_gradients")
    for moment in ("stop", "hang", "host"):
        lost_in(moment, survival, "wait_for_gradients")
    lost_in("rows", python_sums, "Operation")  # between their counts and the rows
    lost_in("communicator", memory, "made_within_limit")  # in the middle of a regrouping
    if kind == "trainer":
        lost_in("update", trainer, "_update", behind=True)
    else:
        lost_in("update", importlib.import_module("gluon_parallel.step.training_step"), "update_copies", behind=True)
    lost_in("evaluation", mx.metric.Accuracy, "update")
    lost_in("saving", gp.archive, "write")
    if any(word.startswith("prepare:") for word in losses):  # lost before gp.prepare, to which the others come later
        lose("prepare")
        until = time.monotonic() + 60
        while not mpi_regrouping._has_lost(store._progress):
            assert time.monotonic() < until, "no process was lost"
            time.sleep(0.01)
    training = KINDS[kind](net, trainer, data, folder)
    if "behind" in LOSSES:
        go_on_behind_a_layer_that_has_failed(net, LOSSES["behind"])
    lost_in("forward", net[-1], "forward")  # the statistics of the first layers are under way
    accuracy, outputs = training.epochs()
    gp.check_replicas(net, store)
    if store.rank == 0:
        weights = [parameter.data().asnumpy() for parameter in net.collect_params().values()]
        np.savez(file, outputs, accuracy, *weights)
    if kind == "own":
        training.refuses()


if __name__ == "__main__":
    main(*sys.argv[1:])
