"""Measure what a run's log and the progress bar add to a step that does next to nothing: processor time beside neither.

    python scripts/benchmarks/step_log.py

The net has six dense layers of 16, and a batch 8 samples. In one process, trainings take turns: one without a run and
without a bar; one with a run that logs every 50th step, and a bar; and one that also logs a value in every step.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from pathlib import Path

import rounds
import rows

STEPS = 100  # in one turn: two rows of the log
NAMES = {
    "neither": "neither", "both": "log every 50 steps, and progress",
    "values": "log every 50 steps, a value in each, and progress",
}  # fmt: skip


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


def serve():
    """In a process of its own: make steps when asked to."""
    import gluon_parallel as gp
    import mxnet as mx

    sys.stderr = Terminal(open("/dev/null", "wb"))
    folder = tempfile.TemporaryDirectory()

    def task(name):
        net = mx.gluon.nn.HybridSequential()
        for _ in range(6):
            net.add(mx.gluon.nn.Dense(16, activation="relu", in_units=16))
        net.initialize()
        net.hybridize()
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9})
        run = None if name == "neither" else gp.Run(Path(folder.name, name))
        training = gp.prepare(net, mx.gluon.loss.SoftmaxCrossEntropyLoss(), trainer, run=run)
        epochs = training.epochs(1, progress=name != "neither")
        next(epochs)
        x, y = mx.nd.random.uniform(shape=(8, 16)), mx.nd.arange(8)

        def steps(repeats, epochs=epochs):
            for _ in range(repeats):
                loss = training.step(x, y)
                if name == "values":
                    training.log(last=loss)
            mx.nd.waitall()

        return steps

    rounds.serve(0, {name: task(name) for name in NAMES})
    folder.cleanup()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help=f"turns of {STEPS} steps each")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    rows.add_options(parser)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    words = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    with rounds.started([("one", rounds.Group("one", [(words, {"OMP_NUM_THREADS": "1"})], 1))]) as groups:
        tasks = {name: (groups["one"], name) for name in NAMES}
        turns = rounds.take_turns(tasks, "", STEPS, options.rounds, warm_up=2 * STEPS)
    taken = {name: [turn.processor for turn in found] for name, found in turns.items()}
    results = rows.Rows(options)
    for name in ("both", "values"):
        results.add("processor time of six dense layers of 16, one device", taken, name, ["neither"], names=NAMES)


if __name__ == "__main__":
    main()
