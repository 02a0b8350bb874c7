"""Measure what a pipeline of two stages gains and costs on this machine, as ratios.

    python scripts/benchmarks/pipeline.py                       two CPU devices with a core each, against one
    python scripts/benchmarks/pipeline.py --parts time --quick
    python scripts/benchmarks/pipeline.py --parts memory

A net of equal convolutions is cut in the middle. The contestants take turns, so that what else the machine does
affects all alike: in steps 3 to 12, and one pipeline in steps 100 to 150, too. The ratio is the speed-up over one
device with one core; with m micro-batches, two stages can reach at most 2m / (m + 1). The processor time shows what
small micro-batches and recomputation cost. Memory is what MXNet's profiler counts on each device during a step, at
most at a time: activations, gradients on their way and temporary arrays, without parameters and their gradients.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import limits
import rounds
import rows

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

LAYERS, CHANNELS, SIDE = 12, 64, 16
MICRO_BATCHES = (4, 8, 16)
ONE_CORE = {"OMP_NUM_THREADS": "1"}
LOSS = gluon.loss.L2Loss()
# name -> (micro-batches, order, recompute)
PIPELINES = {
    f"{num} {order}{' recompute' * recompute}": (num, order, recompute)
    for num in MICRO_BATCHES
    for order in ("1f1b", "gpipe")
    for recompute in (False, True)
    if num == 8 or not recompute
}
GOES_ON = "8 1f1b"  # is measured in late steps too; all of them would take nine minutes
EARLY, LATE = rounds.periods()


def make_net():
    net = gluon.nn.HybridSequential()
    for _ in range(LAYERS):
        net.add(gluon.nn.Conv2D(CHANNELS, 3, padding=1, in_channels=CHANNELS, activation="relu"))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def make_step(name, num):
    """A function that trains on one batch of `num` images, and waits for it."""
    net, optimizer = make_net(), ("sgd", {"learning_rate": 1e-3})
    batch = tuple(nd.random.uniform(shape=(num, CHANNELS, SIDE, SIDE)) for _ in range(2))
    if name == "one":
        step: Any = gp.DataParallel(net, LOSS, gluon.Trainer(net.collect_params(), *optimizer))
    else:
        num_micro_batches, order, recompute = PIPELINES[name]
        pipe = gp.Pipeline(net, [mx.cpu(0), mx.cpu(1)], num_micro_batches, order, recompute)
        step = functools.partial(pipe.step, LOSS, gluon.Trainer(pipe.collect_params(), *optimizer))

    def run(repeats):
        for _ in range(repeats):
            step(*batch)
            nd.waitall()

    return run


def serve(kind, num):
    """One process: one device, or all pipelines."""
    names = ["one"] if kind == "one" else list(PIPELINES)
    rounds.serve(0, {name.replace(" ", "-"): make_step(name, num) for name in names})


def benchmark_time(options, results):
    """Speed-up over one device, and its share of the formula's."""
    command = [sys.executable, str(Path(__file__).resolve()), "--images", str(options.images), "--serve"]
    kinds = ("one", "pipelines")
    with rounds.started((kind, rounds.Group(kind, [([*command, kind], ONE_CORE)], 1)) for kind in kinds) as groups:
        turns = {"one": (groups["one"], "one")}
        turns |= {name: (groups["pipelines"], name.replace(" ", "-")) for name in PIPELINES}
        taken = {EARLY: rounds.take_turns(turns, "", 1, 10, 2)}
        if not options.quick:
            turns = {name: turns[name] for name in ("one", GOES_ON)}
            taken[LATE] = rounds.take_turns(turns, "", 1, 51, 87)
    part = f"{LAYERS} convolutions, {options.images} images per step"
    work = {"flop": options.images * limits.flop(make_net(), (CHANNELS, SIDE, SIDE))}
    for when, found in taken.items():
        for name in [name for name in PIPELINES if name in found]:
            num = PIPELINES[name][0]
            called = {name: f"pipeline of 2 devices, {name} (at most {2 * num / (num + 1):.2f})", "one": "one device"}
            results.add(part, found, name, ["one"], names=called, when=when, work=work)


def measure_memory(name, num):
    """Bytes per device at most at a time in one step, after two others; in a process of its own."""
    run = make_step(name, num)
    run(2)
    devices = [mx.cpu(0)] if name == "one" else [mx.cpu(0), mx.cpu(1)]
    return gp.pipeline.profile.peaks(devices, lambda: run(1))


def benchmark_memory(options, results):
    """Each device's memory against that of the unsplit net."""
    found = {}
    for name in ["one", *(name for name, (num, _, _) in PIPELINES.items() if num == 8)]:
        argv = [sys.executable, str(Path(__file__).resolve()), "--memory", name, "--images", str(options.images)]
        done = subprocess.run(argv, env={**rounds.os.environ, **ONE_CORE}, capture_output=True, text=True, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    part = f"{LAYERS} convolutions, {options.images} images per step: memory of a device"
    for name in list(found)[1:]:
        for number, count in enumerate(found[name], 1):
            called = f"pipeline, {name}, device {number}"
            results.add(part, {called: [count], "one device": found["one"]}, called, unit="MB")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts", nargs="+", default=["time", "memory"], choices=["time", "memory"], help="of the benchmark (both)"
    )
    parser.add_argument("--images", type=int, default=128, help="per step (128)")
    rows.add_options(parser, has_late_steps=True)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    if options.serve:
        serve(options.serve, options.images)
    elif options.memory:
        print(json.dumps(measure_memory(options.memory, options.images)))
    else:
        parts = {"time": benchmark_time, "memory": benchmark_memory}
        results = rows.Rows(options)
        for part in options.parts:
            parts[part](options, results)


if __name__ == "__main__":
    main()
