"""Measure steps of a text classifier with dense and with row_sparse gradients of its embedding, over processes.

    gluon-parallel launch -n 2 --devices cpu:1 scripts/benchmarks/sparse.py
    gluon-parallel launch -n 2 --devices cpu:1 scripts/benchmarks/sparse.py --vocab-size 20000 --embed-size 64

Both are measured in turns, on random words. The bytes are those of the embedding's gradient that each process sends to
each other one with sparse gradients, and what the dense one has.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np
import rows

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon


def main(options):
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
    for _number in range(options.steps + 3):
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
    results.add(part, {sparse: times[3:] for sparse, times in seconds.items()}, True, names=names)
    sizes = {True: [sparse_bytes], False: [dense]}
    results.add(f"{part}: bytes of the embedding's gradient", sizes, True, names=names, unit="MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=50_000, help="different words")
    parser.add_argument("--embed-size", type=int, default=256, help="numbers per word")
    parser.add_argument("--hidden-size", type=int, default=128, help="numbers in the LSTM's state")
    parser.add_argument("--words", type=int, default=2000, help="of each process in each step")
    parser.add_argument("--batch-size", type=int, default=50, help="texts of each process in each step")
    parser.add_argument("--steps", type=int, default=20, help="training steps that are measured")
    rows.add_options(parser)
    sys.exit(main(parser.parse_args()))
