"""Measure what sharded optimizer state saves and costs: memory and steps of gp.DataParallel with and without it.

    python scripts/benchmarks/shard_optimizer.py                      2 processes: LeNet, an LSTM, and 100 MB of weights
    python scripts/benchmarks/shard_optimizer.py --processes 4 --nets dense24 --optimizer adam

Two groups of processes, one of them with ``shard_optimizer=True``, take turns. Printed are the ratios of two turns that
follow each other, of steps 3 to 12 and of steps 100 to 150, and the memory of a process after them: its own pages, and
its share of those that the processes of the host have in common. Python, MXNet and the net's activations are in both.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path

import kvstore
import numpy as np
import rounds
import rows

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

TITLES = {**kvstore.TITLES, "lstm": "an LSTM"}
NETS = ("lenet", "lstm", "dense24")


def network(name):
    """(net, inputs, labels) for one process."""
    if name != "lstm":
        net, shape, num = kvstore.network(name)
        return net, mx.nd.random.uniform(shape=(num, *shape)), mx.nd.arange(num) % 10
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Embedding(2000, 200), gluon.rnn.LSTM(200, 2, layout="NTC"), gluon.nn.Dense(2000, flatten=False))
    words = mx.nd.random.randint(0, 2000, (16, 36)).astype("float32")
    return net, words[:, :-1], words[:, 1:]


def memory():
    """Bytes of this process, with its share of what it has in common with others."""
    rows = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(rows["Pss"].split()[0]) << 10


def worker(options):
    """One process of a group."""
    warnings.simplefilter("ignore", gp.errors.SeparateTraining)  # all take the same samples, on purpose
    devices = gp.devices("cpu:1")
    store = gp.kvstore.create("mpi")
    gp.kvstore.create("mpi").pushpull("ready", mx.nd.zeros(1))
    net, x, y = network(options.nets[0])
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize(static_alloc=True)
    trainer = gluon.Trainer(net.collect_params(), options.optimizer, {"learning_rate": 1e-3}, kvstore=store)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    step = gp.DataParallel(net, loss, trainer, devices, shard_optimizer=options.worker == "sharded")

    def repeat(times):
        for _ in range(times):
            step(x, y)
        mx.nd.waitall()

    def measure(_):
        repeat(2)
        rows = gp.metrics.gather_rows(np.array([[memory()]]), store)[:, 0]
        if store.rank == 0:
            Path(options.told, options.worker).write_text(f"{rows.mean()}")

    rounds.serve(store.rank, {"step": repeat, "memory": measure})


def start(name, net, options, told):
    """A group of processes."""
    words = [str(Path(__file__).resolve()), "--worker", name, "--nets", net, "--optimizer", options.optimizer]
    threads = max(1, len(os.sched_getaffinity(0)) // options.processes)
    command = [*rounds.mpirun(options.processes), sys.executable, *words, "--told", told]
    return rounds.Group(name, [(command, {**rounds.AS_ROOT, "OMP_NUM_THREADS": str(threads)})], options.processes)


def compare(net, options, told, results):
    """Time and memory of one net."""
    called = {"plain": "all state in each process", "sharded": "`shard_optimizer=True`"}
    part = f"{TITLES[net]}, {options.optimizer}, {options.processes} processes"
    work = None if net == "lstm" else kvstore.work(net, options.processes)
    with rounds.started((name, start(name, net, options, told)) for name in called) as groups:
        for when, taken in rounds.early_and_late(groups, "step", options.quick):
            results.add(part, taken, "sharded", names=called, when=when, work=work)
        for group in groups.values():
            group.run("memory", 1)
    sizes = {name: [float(Path(told, name).read_text())] for name in called}
    results.add(f"{part}: memory of a process", sizes, "sharded", names=called, unit="MB")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="of each group (2)")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS), help="what is trained")
    parser.add_argument("--optimizer", default="adam", help="MXNet's name of it (adam)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--told", help=argparse.SUPPRESS)
    options = rows.parse(parser, worker)
    with tempfile.TemporaryDirectory() as told:
        results = rows.Rows(options)
        for net in options.nets:
            compare(net, options, told, results)


if __name__ == "__main__":
    main()
