"""How many updates per second each mode makes, with equal workers and with one four times slower; what a push costs.

    python scripts/benchmarks/asynchronous.py
    python scripts/benchmarks/asynchronous.py --devices cpu:4 --repeats 9

Modes take turns within one run, each with new nets, and what counts are ratios: a shared machine is slow at some
moments. A step is one gradient of each worker on average; steps 3 to 12 and steps 100 to 150 are compared. The slow
worker sleeps for three times as long as its step has taken.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

import numpy as np
import rounds
import rows

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

MODES = ("sync", "ssp:2", "async", "dc:0.04")


class Laggard:
    """Called in each forward pass of a worker that shall be slow, which then sleeps."""

    def __init__(self, slow):
        self.slow, self.since = slow, time.perf_counter()

    def __call__(self, *_):
        took = min(time.perf_counter() - self.since, 0.1)  # the first step of a pass has no beginning
        time.sleep(took * (self.slow - 1))
        self.since = time.perf_counter()


def build(mode, devices, slow):
    workers = itertools.count()

    def make_net():
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(256, in_units=784, activation="relu"), gluon.nn.Dense(10, in_units=256))
        net.initialize(mx.init.Xavier())
        net.hybridize()
        if slow > 1 and next(workers) == 0:
            net.register_forward_hook(Laggard(slow))
        return net

    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    return gp.asynchronous.Asynchronous(make_net, loss, devices, mode, "sgd", {"learning_rate": 0.05})


def pushes(parallel, data):
    """When each gradient has been pushed, in a training on `data`."""
    when = []
    parallel.train(data, observe=lambda *_: when.append(time.perf_counter()))
    return when


def benchmark_modes(options, results):
    """Time per gradient that is used; a round of `sync` uses those of all workers."""
    devices = gp.devices(options.devices)
    random = np.random.RandomState(0)
    periods = rounds.periods(options.quick)
    count = max(steps.stop for steps in periods.values()) * len(devices)
    data = [(random.randn(64, 784).astype("float32"), random.randint(10, size=64)) for _ in range(count)]
    for slow in (1, 4):
        taken: dict[str, dict[str, list[float]]] = {when: {mode: [] for mode in MODES} for when in periods}
        for _ in range(options.repeats):
            for mode in MODES:
                pushed = pushes(build(mode, devices, slow), data)
                for when, steps in periods.items():
                    first, last = steps.start * len(devices), steps.stop * len(devices)
                    taken[when][mode].append((pushed[last - 1] - pushed[first - 1]) / (last - first))
        title = "all workers alike" if slow == 1 else f"one worker {slow} times slower"
        part, names = f"time per gradient, {len(devices)} workers, {title}", {name: f"`{name}`" for name in MODES}
        for when, seconds in taken.items():
            for mode in MODES[1:]:
                results.add(part, seconds, mode, ["sync"], names=names, when=when, unit="us")


def benchmark_store(options, results):
    """Time of a pull and a push, and of the same update on bare arrays; a step is ten of them."""
    periods, per_step = rounds.periods(options.quick), 10
    num_steps = max(steps.stop for steps in periods.values())
    for size in (1000, 100_000, 1_000_000):
        gradient = np.full(size, 0.5, np.float32)
        contestants = {"the update alone": bare(gradient)}
        for mode in ("sync", "async", "dc:0.04"):
            contestants[f"`{mode}`"] = through_store(mode, gradient, num_steps * per_step)
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(num_steps):
            for name, step in contestants.items():
                begin = time.perf_counter()
                for _ in range(per_step):
                    step()
                seconds[name].append((time.perf_counter() - begin) / per_step)
        for when, steps in periods.items():
            taken = {name: turns[steps] for name, turns in seconds.items()}
            for name in list(taken)[1:]:
                part = f"pull and push of {size:,} weights"
                results.add(part, taken, name, ["the update alone"], when=when, unit="us")


def bare(gradient):
    """The update of an array without a store."""
    weights = np.zeros_like(gradient)

    def step():
        nonlocal weights
        weights = weights - 0.1 * gradient

    return step


def through_store(mode, gradient, count):
    """A pull and a push of a store that expects so many."""
    store = gp.asynchronous.create_store(mode, np.zeros_like(gradient), 1, gp.asynchronous.rules.optimizer("sgd"), 0.1)
    store.begin(range(count))

    def step():
        store.take(0)
        store.push(0, gradient)

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:2", help="a worker on each (cpu:2)")
    parser.add_argument("--repeats", type=int, default=7, help="how often each mode takes its turn (7)")
    rows.add_options(parser, has_late_steps=True)
    options = parser.parse_args()
    results = rows.Rows(options)
    benchmark_modes(options, results)
    benchmark_store(options, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
