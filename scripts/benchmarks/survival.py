"""Measure what --min-processes costs while no process is lost: steps and memory of gp.prepare with and without it.

    python scripts/benchmarks/survival.py                     2 processes: LeNet, ResNet-20, and 25 MB of weights
    python scripts/benchmarks/survival.py --nets lenet --quick

Two groups, one of them started with ``--min-processes 1``, take turns. Printed are the ratios of two turns that
follow each other, of steps 3 to 12 and of steps 100 to 150, and the memory that a process has taken at most.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

import kvstore
import rounds
import rows

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

NETS = ("lenet", "resnet20", "dense6")
OPTIONS = {"all": [], "least": ["--min-processes", "1"]}  # group -> of the launcher


def worker(options):
    """One process of a group."""
    [name] = options.nets
    net, shape, num = kvstore.network(name)
    net.initialize(mx.init.Xavier(), ctx=gp.devices("auto"))
    net.hybridize(static_alloc=True)
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-3})
    batch = [mx.nd.random.uniform(shape=(num, *shape)), mx.nd.arange(num) % 10]  # reading data is no part of it
    numbers = gluon.data.SimpleDataset(range(2 * num * 1000))
    loader = gluon.data.DataLoader(numbers, 2 * num, batchify_fn=lambda _: batch)
    training, train = gp.prepare(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, loader)
    batches = itertools.chain.from_iterable(itertools.repeat(train))  # one epoch after the other

    def repeat(times):
        for _ in range(times):
            training.step(*next(batches))
        mx.nd.waitall()

    rounds.serve(training.rank, {"step": repeat})


def compare(net, options, folder, results):
    """Time and memory of one net."""
    launch = [sys.executable, "-m", "gluon_parallel", "launch", "-n", "2", "--devices", "cpu:1", "--quiet"]
    me = [str(Path(__file__).resolve()), "--worker", "--nets", net]

    def start(name):
        words = [*launch, "--logs", str(Path(folder, net, name)), *OPTIONS[name], *me]
        return rounds.Group(name, [(words, {"OMP_NUM_THREADS": "1"})], 2)

    called = {"all": "without `--min-processes`", "least": "`--min-processes 1`"}
    part, work = f"{kvstore.TITLES[net]}, adam, 2 processes", kvstore.work(net)
    with rounds.started((name, start(name)) for name in OPTIONS) as groups:
        for when, taken in rounds.early_and_late(groups, "step", options.quick):
            results.add(part, taken, "least", names=called, when=when, work=work)
        memory = {name: [groups[name].peak_memory() * 1e9 / 2] for name in OPTIONS}
    results.add(f"{part}: most memory of a process", memory, "least", names=called, unit="MB")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS), help="what is trained")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = rows.parse(parser, worker)
    with tempfile.TemporaryDirectory() as folder:
        results = rows.Rows(options)
        for net in options.nets:
            compare(net, options, folder, results)


if __name__ == "__main__":
    main()
