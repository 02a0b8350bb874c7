"""Measure what the package adds to a step that does next to nothing: processor time beside a plain loop of MXNet.

    python scripts/benchmarks/tiny_step.py

The net has six dense layers of 16, and a batch 8 samples. Each contestant is a process (or two) of its own, and they
take turns. The plain loop runs in a process that has loaded nothing of the package but what makes MXNet importable; the
"imported" one is the same loop after ``import gluon_parallel``. All loops compute the batch's mean loss. Measured
is the processor time per step and process.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
import warnings
from pathlib import Path

import rounds
import rows

ROOT = Path(__file__).resolve().parents[2]
STEPS = 50  # in one turn
ROLES = {
    "plain": "plain MXNet", "imported": "plain loop after import gluon_parallel", "parallel": "gp.DataParallel",
    "processes": "gp.DataParallel on two processes",
}  # fmt: skip


def load(role):
    """MXNet, and the package unless the role is to do without."""
    if role == "plain":  # the folder without what its __init__.py does
        package = types.ModuleType("gluon_parallel")
        package.__path__ = [str(ROOT / "gluon_parallel")]
        sys.modules["gluon_parallel"] = package
        return importlib.import_module("gluon_parallel.mxnet.compat").mx, None
    gp = importlib.import_module("gluon_parallel")  # first: it makes MXNet importable
    return importlib.import_module("mxnet"), gp


def serve(role, num_devices):
    """In a process of a group: make steps when asked to."""
    mx, gp = load(role)
    devices = [mx.cpu(number) for number in range(num_devices)]
    store = gp.kvstore.create("mpi") if role == "processes" else None
    net = mx.gluon.nn.HybridSequential()
    for _ in range(6):
        net.add(mx.gluon.nn.Dense(16, activation="relu", in_units=16))
    net.initialize(ctx=devices)
    net.hybridize()
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    options = {"kvstore": store} if store else {} if num_devices == 1 else {"update_on_kvstore": False}
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9}, **options)
    x, y = mx.nd.random.uniform(shape=(8, 16)), mx.nd.arange(8)

    def plain():
        xs, ys = (mx.gluon.utils.split_and_load(one, devices) for one in (x, y))
        with mx.autograd.record():
            losses = [loss(net(a), b) for a, b in zip(xs, ys)]
        mx.autograd.backward(losses)
        trainer.step(len(x))
        return sum(one.mean().as_in_context(devices[0]) for one in losses) / len(losses)

    if role in ("plain", "imported"):
        step = plain
    else:
        parallel = gp.DataParallel(net, loss, trainer)
        warnings.filterwarnings("ignore", category=gp.errors.SeparateTraining)  # of equal batches
        step = lambda: parallel.step(x, y)  # noqa: E731

    def run(repeats):
        for _ in range(repeats):
            step()
        mx.nd.waitall()

    rounds.serve(store.rank if store else 0, {"step": run})


def group(role, num_devices):
    words = [sys.executable, str(Path(__file__).resolve()), "--serve", role, str(num_devices)]
    num = 2 if role == "processes" else 1
    words = [*rounds.mpirun(num), *words] if num > 1 else words
    return rounds.Group(ROLES[role], [(words, {"OMP_NUM_THREADS": "1", **rounds.AS_ROOT})], num)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, help=f"turns of {STEPS} steps each")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    rows.add_options(parser)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], int(options.serve[1]))
        return
    results = rows.Rows(options)
    for num_devices, roles in ((1, ROLES), (2, [role for role in ROLES if role != "processes"])):
        with rounds.started((role, group(role, num_devices)) for role in roles) as groups:
            turns = rounds.take_turns(groups, "step", STEPS, options.rounds, warm_up=2 * STEPS)
        taken = {role: [turn.processor / turn.processes for turn in found] for role, found in turns.items()}
        part = f"processor time of six dense layers of 16, {num_devices} device{'s' * (num_devices > 1)}"
        for role in taken:
            if role != "plain":
                results.add(part, taken, role, ["plain"], names=ROLES)


if __name__ == "__main__":
    main()
