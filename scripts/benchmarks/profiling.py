"""Measure how much longer training steps take while ``gp.profile`` records them.

    python scripts/benchmarks/profiling.py
    python scripts/benchmarks/profiling.py --nets lstm --quick

Two processes train on two CPU devices; one records from its second step on. They take turns step by step, and the
median of the ratios counts. MXNet's profiler costs some microseconds per operator, which the nets of many small
operators show.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from pathlib import Path

import limits
import rounds
import rows

import gluon_parallel as gp
import mxnet as mx

nn = mx.gluon.nn
RECORDED, PLAIN = "recorded by `gp.profile`", "not recorded"


class UnrolledLSTM(mx.gluon.HybridBlock):
    """An LSTM cell over 40 steps: some 500 operators that take microseconds."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.cell, self.output = mx.gluon.rnn.LSTMCell(64, input_size=32), nn.Dense(10, in_units=64)

    def hybrid_forward(self, F, x):
        """From (n, 40, 32) to (n, 10)."""
        outputs, _ = self.cell.unroll(40, x, merge_outputs=False)
        return self.output(outputs[-1])


def dense_layers():
    """31 small layers."""
    net = nn.HybridSequential()
    net.add(*(nn.Dense(64, in_units=64, activation="relu") for _ in range(30)), nn.Dense(10, in_units=64))
    return net


# The net, and the shape of a batch.
NETS = {
    "lenet": (lambda: gp.models.LeNet(num_classes=10), (256, 1, 28, 28)),
    "dense": (dense_layers, (256, 64)),
    "lstm": (UnrolledLSTM, (64, 40, 32)),
}


TITLES = {"lenet": "LeNet, 256 images", "dense": "31 small dense layers", "lstm": "an LSTM cell over 40 steps"}


def worker(options):
    """One process: training steps of one net."""
    make, shape = NETS[options.nets[0]]
    devices, net = gp.devices("cpu:2"), make()
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    parallel = gp.DataParallel(net, mx.gluon.loss.SoftmaxCrossEntropyLoss(), trainer, devices)
    x, y = mx.nd.random.uniform(shape=shape), mx.nd.arange(shape[0]) % 10

    def steps(repeats):
        for _ in range(repeats):
            parallel.step(x, y)
            mx.nd.waitall()

    with contextlib.ExitStack() as recording:
        if options.worker == RECORDED:
            recording.enter_context(contextlib.redirect_stdout(io.StringIO()))  # the summary
            recording.enter_context(gp.profile(options.folder, steps=sys.maxsize, skip=1))
        rounds.serve(0, {"step": steps})


def compare(name, options, results):
    """Steps without and with recording."""
    make, shape = NETS[name]
    work = None if name == "lstm" else {"flop": shape[0] * limits.flop(make(), shape[1:])}
    with tempfile.TemporaryDirectory() as folder, rounds.started() as groups:
        me = [sys.executable, str(Path(__file__).resolve()), "--nets", name, "--folder", folder, "--worker"]
        for side in (RECORDED, PLAIN):
            groups[side] = rounds.Group(side, [([*me, side], {})], 1)
        for when, taken in rounds.early_and_late(groups, "step", options.quick):
            results.add(f"{TITLES[name]}, two CPU devices", taken, RECORDED, when=when, work=work)


def main():
    """Read the command line and run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS), help="which nets (all)")
    parser.add_argument("--worker", choices=(RECORDED, PLAIN), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = rows.parse(parser, worker)
    results = rows.Rows(options)
    for name in options.nets:
        compare(name, options, results)


if __name__ == "__main__":
    main()
