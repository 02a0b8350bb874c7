"""Measure steps of a text classifier with dense and with row_sparse gradients of its embedding, over processes.

    gluon-parallel launch -n 2 --devices cpu:1 scripts/benchmarks/sparse.py
    gluon-parallel launch -n 2 --devices cpu:1 scripts/benchmarks/sparse.py --vocab-size 20000 --embed-size 64
    gluon-parallel launch -n 4 --devices cpu:1 scripts/benchmarks/sparse.py --shares 0.02 0.1 0.5     the exchange alone
    python scripts/benchmarks/sparse.py --accuracy                                          what lazy updates change

Sparse and dense gradients are measured in turns, on random words, in steps 3 to 12 and 100 to 150. The bytes are those
of the embedding's gradient that each process sends to each other one with sparse gradients, and what the dense one has.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np
import rounds
import rows

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon


def exchange(options):
    """Times of one exchange, where each process has gradients of so large a share of all words."""
    store = gp.kvstore.create("mpi")
    random = np.random.default_rng(store.rank)
    for share in options.shares:
        rows = np.sort(random.permutation(options.vocab_size)[: round(share * options.vocab_size)])
        values, shape = mx.nd.ones((len(rows), options.embed_size)), (options.vocab_size, options.embed_size)
        sparse = mx.nd.sparse.row_sparse_array((values, mx.nd.array(rows, dtype="int64")), shape=shape)
        gradients = {"dense": sparse.tostype("default"), "row_sparse": sparse}
        seconds: dict[str, list[float]] = {name: [] for name in gradients}
        for _number in range(options.steps + 3):
            for name, gradient in gradients.items():
                array = gradient.copy()
                array.wait_to_read()
                gp.metrics.gather_rows(np.zeros((1, 1)), store)  # all begin together
                began = time.perf_counter()
                store.pushpull(f"{name} {share}", array)
                array.wait_to_read()
                seconds[name].append(time.perf_counter() - began)
        received = (store.num_workers - 1) * len(rows) * (8 + 4 * options.embed_size)
        took = ", ".join(f"{name} {1e3 * statistics.median(times[3:]):.1f} ms" for name, times in seconds.items())
        if store.rank == 0:
            print(f"{store.num_workers} processes, {share:.0%} of the rows each: {received / 1e6:.2f} MB, {took}")


def train(sparse, lazy, seed, epochs):
    """Accuracies in % after each epoch of the text classifier on the embedded stories, on one device.

    A batch of 8 texts has 33 of the 60 words on average, so that lazy updates leave many words out.
    """
    mx.random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (the generator that MXNet's initializers use)
    text = gp.datasets.text
    data = text.load("before_after")
    words = text.Vocabulary(data.train.texts, 20000)
    batches, test = (
        text.batches(
            [words.encode(one, 200) for one in part.texts], part.labels, 8, shuffle=part is data.train, seed=seed
        )
        for part in (data.train, data.test)
    )
    net, devices = gp.models.TextLSTM(len(words), data.num_classes, sparse_grad=sparse), gp.devices("cpu:1")
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.005, "lazy_update": lazy})
    step = gp.DataParallel(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, devices, clip_global_norm=1.0)
    accuracies = []
    for _epoch in range(epochs):
        for texts, labels in batches:
            step(texts, labels)
        [(_, found)] = gp.evaluate(net, test, "acc", devices)
        accuracies.append(100 * found)
    return accuracies


def compare_accuracies(options):
    """A table of the final accuracies of three seeds, and of the epochs until the first one of 99 %."""
    ways = {"dense": (False, False), "row_sparse, `lazy_update=False`": (True, False), "row_sparse, lazy": (True, True)}
    for name, way in ways.items():
        cells = []
        for seed in range(3):
            found = train(*way, seed, options.epochs)
            first = next((str(epoch) for epoch, one in enumerate(found, 1) if one >= 99), "-")
            cells.append(f"{found[-1]:.1f} ({first})")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main(options):
    if options.accuracy:
        compare_accuracies(options)
        return
    if options.shares:
        exchange(options)
        return
    store, random = gp.kvstore.create("mpi"), np.random.default_rng(0)
    devices = gp.devices("cpu:1")
    steps = {}
    for sparse in (False, True):
        net = gp.models.TextLSTM(options.vocab_size, 4, options.embed_size, options.hidden_size, sparse_grad=sparse)
        net.initialize(mx.init.Xavier(), ctx=devices)
        net.hybridize()
        trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.002}, kvstore=store)
        loss = gluon.loss.SoftmaxCrossEntropyLoss()
        steps[sparse] = gp.DataParallel(net, loss, trainer, devices, clip_global_norm=1.0), net
        # A trainer of the same store would exchange under the same keys.
        store = gp.kvstore.create("mpi")

    length, lengths = (
        options.words // options.batch_size,
        mx.nd.full(options.batch_size, options.words // options.batch_size),
    )
    seconds: dict[bool, list[float]] = {sparse: [] for sparse in steps}
    num_rows = []
    periods = rounds.periods(options.quick)
    for _number in range(max(steps_of.stop for steps_of in periods.values())):
        # Words of a language: the most frequent one is every 15th or so.
        tokens = random.zipf(1.1, (store.num_workers, options.batch_size, length)) % options.vocab_size
        labels = mx.nd.array(random.integers(0, 4, options.batch_size))
        mine = tokens[store.rank]
        num_rows.append(len(np.unique(mine)))
        for sparse, (step, net) in steps.items():
            gp.metrics.gather_rows(np.zeros((1, 1)), store)  # all begin together
            began = time.perf_counter()
            step((mx.nd.array(mine), lengths), labels)
            for parameter in net.collect_params().values():
                parameter.data(devices[0]).wait_to_read()
            seconds[sparse].append(time.perf_counter() - began)
    if store.rank:
        return
    dense = 4 * options.vocab_size * options.embed_size
    sparse_bytes = statistics.median(num_rows) * (8 + 4 * options.embed_size)
    part = (
        f"embedding of {options.vocab_size:,} x {options.embed_size}, {options.words:,} words per process and step, "
        f"{store.num_workers} processes"
    )
    results = rows.Rows(options, f"gluon-parallel launch -n {store.num_workers} --devices cpu:1")
    names = {True: "row_sparse gradient", False: "dense gradient"}
    for when, turns in periods.items():
        results.add(part, {sparse: times[turns] for sparse, times in seconds.items()}, True, names=names, when=when)
    sizes = {True: [sparse_bytes], False: [dense]}
    results.add(f"{part}: bytes of the embedding's gradient", sizes, True, names=names, unit="MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=50_000, help="different words")
    parser.add_argument("--embed-size", type=int, default=256, help="numbers per word")
    parser.add_argument("--hidden-size", type=int, default=128, help="numbers in the LSTM's state")
    parser.add_argument("--words", type=int, default=2000, help="of each process in each step")
    parser.add_argument("--batch-size", type=int, default=50, help="texts of each process in each step")
    parser.add_argument("--steps", type=int, default=20, help="number of exchanges that --shares measures")
    parser.add_argument("--shares", nargs="+", type=float, help="time the exchange alone, of these shares of rows")
    parser.add_argument("--accuracy", action="store_true", help="compare accuracies with lazy updates and without")
    parser.add_argument("--epochs", type=int, default=4, help="of each training that --accuracy compares")
    rows.add_options(parser, has_late_steps=True)
    sys.exit(main(parser.parse_args()))
