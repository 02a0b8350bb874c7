"""What waiting costs and what not waiting costs: synchronous, asynchronous and between, with one slow worker.

    python scripts/studies/sync_async.py                      about a minute on two cores: a table and a picture
    python scripts/studies/sync_async.py --quick              fewer repetitions
    python scripts/studies/sync_async.py --workers 16 --slow 8

A small net learns handwritten digits. The gradients are real; the clock is virtual, so every number but those of the
last section follows from the seed. The last section trains with MXNet, on devices one of which is made slow.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import simulator
import sync_async_picture as picture

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

asynchronous = gp.asynchronous

BATCH, HIDDEN, MOMENTUM = 16, 32, 0.8
LR_PER_WORKER = 0.15 / 8  # so that a round of 8 workers has 0.15, which is bold: staleness shows
GOAL = 0.9
MODES = ("sync", "backup:1", "ssp:1", "ssp:4", "local:4", "elastic", "async", "dc:10")
DELAYS = (1, 2, 4, 8, 16)
NET = simulator.FlatNet(num_inputs=196, num_hidden=HIDDEN, num_classes=10)


class Problem(NamedTuple):
    """Digits at half their size."""

    x: np.ndarray  # (N, 196)
    y: np.ndarray  # (N,)
    test_x: np.ndarray
    test_y: np.ndarray


def load():
    data = gp.datasets.load("digits")
    x, test_x = (part.images[:, 0, ::2, ::2].reshape(-1, 196) for part in (data.train, data.test))
    return Problem(x, data.train.labels, test_x, data.test.labels)


def accuracy(weights, problem):
    return NET.accuracy(weights, problem.test_x, problem.test_y)


def batches(problem, epochs, seed):
    loader = gp.datasets.batches(problem.x, problem.y, BATCH, shuffle=True, seed=seed, last_batch="discard")
    for _ in range(epochs):
        yield from loader


class Outcome(NamedTuple):
    """One run; or the mean of several, with the same names."""

    seconds: float  # of the virtual clock, for all epochs
    updates: float  # per second
    staleness: float  # mean
    accuracy: float  # at the end
    goal: float  # seconds until the accuracy was reached and nan if it never was


def run(mode, problem, workers, epochs, seed, points=0):
    """Train on the virtual clock; returns the outcome and, at `points` moments, (seconds, accuracy)."""
    update = asynchronous.rules.optimizer("sgd", {"momentum": MOMENTUM})
    store = asynchronous.create_store(mode, NET.initial(seed), len(workers), update, LR_PER_WORKER * len(workers))
    every = max(1, len(problem.y) // BATCH * epochs // points) if points else 10**9
    curve, pushes = [], 0

    def observe(now, store):
        nonlocal pushes
        if pushes % every == 0:
            curve.append((now, accuracy(store.weights, problem)))
        pushes += 1

    with np.errstate(over="ignore", invalid="ignore"):  # what diverges may do so; its accuracy tells
        trace = simulator.simulate(store, NET.gradient, workers, batches(problem, epochs, seed), seed, observe=observe)
        final = accuracy(store.weights, problem)
    reached = [now for now, value in curve if value >= GOAL]
    goal = reached[0] if reached else float("nan")
    outcome = Outcome(trace.seconds, store.version / trace.seconds, store.staleness.mean, final, goal)
    return outcome, curve, trace


def mean(outcomes):
    return Outcome(*(float(np.mean(values)) for values in zip(*outcomes)))


def workers_of(count, slow):
    """`count` workers with steps of about a second, of which the first takes `slow` times as long."""
    uneven = simulator.uneven
    return [simulator.Worker(uneven(slow if number == 0 else 1.0, spread=0.3)) for number in range(count)]


def along(grid, curve):
    seconds, values = zip(*curve)
    return np.interp(grid, seconds, values)


def compare_modes(problem, options):
    """{mode: mean outcome} and {mode: mean curve}, all on the same workers and batches."""
    workers = workers_of(options.workers, options.slow)
    outcomes, curves = {}, {}
    for mode in MODES:
        runs = [run(mode, problem, workers, options.epochs, seed, points=60) for seed in range(options.seeds)]
        outcomes[mode] = mean([outcome for outcome, _, _ in runs])
        grid = np.linspace(0, max(curve[-1][0] for _, curve, _ in runs), 100)
        curves[mode] = grid, np.mean([along(grid, curve) for _, curve, _ in runs], axis=0)
    return outcomes, curves


def compare_numbers(problem, options, modes=("sync", "ssp:1", "async", "dc:10")):
    """{mode: {number of workers: mean outcome}}; every worker is as fast as the others."""
    return {mode: {count: several(mode, problem, workers_of(count, 1.0), options) for count in options.numbers}
            for mode in modes}  # fmt: skip


def compare_delays(problem, options, modes=("sync", "ssp:1", "backup:1", "async")):
    """{mode: {how much slower one worker is: mean outcome, of two runs}}."""
    return {
        mode: {slow: several(mode, problem, workers_of(options.workers, slow), options, seeds=2) for slow in DELAYS}
        for mode in modes
    }


def several(mode, problem, workers, options, seeds=None):
    """The mean outcome of as many runs as there are seeds."""
    seeds = range(options.seeds if seeds is None else seeds)
    return mean([run(mode, problem, workers, options.epochs, seed, points=40)[0] for seed in seeds])


def one_large_step(problem, num=8):
    """How far a sync step of `num` workers is from one step on the `num`-fold batch, at most."""
    several_batches = [batch for batch, _ in zip(batches(problem, 1, seed=0), range(num))]
    store = asynchronous.create_store("sync", NET.initial(0), num, asynchronous.rules.sgd, lr=0.15)
    simulator.simulate(store, NET.gradient, workers_of(num, 4.0), several_batches)
    joined = tuple(np.concatenate(parts) for parts in zip(*several_batches))
    alone = asynchronous.rules.sgd(NET.initial(0), NET.gradient(NET.initial(0), joined)[0], (), lr=0.15)[0]
    return float(np.abs(store.weights - alone).max())


def compare_deaths(options, modes=("sync", "ssp:1", "async")):
    """{mode: what becomes of it} when one worker dies at its tenth step and nobody notices."""
    found = {}
    for mode in modes:
        workers = workers_of(options.workers, 1.0)
        workers[-1] = workers[-1]._replace(dies_at=10)
        store = asynchronous.create_store(mode, np.zeros(1), options.workers, asynchronous.rules.sgd, 0.1)
        trace = simulator.simulate(store, lambda weights, batch: (weights, 1), workers, range(400))
        found[mode] = f"waits for ever from {trace.seconds:.0f} s on" if trace.stalled else "goes on without it"
    return found


def run_for_real(problem, modes=("sync", "ssp:1", "backup:1", "async"), fast=0.08, slow=0.64):
    """{mode: (updates per second with MXNet on 3 devices, one of them slow; the same on the virtual clock)}."""
    devices = gp.devices("cpu:3")
    data = list(batches(problem, 1, seed=0))[:24]

    workers = itertools.count()

    def make_net():
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(HIDDEN, in_units=196, activation="relu"), gluon.nn.Dense(10, in_units=HIDDEN))
        net.initialize(mx.init.Xavier())
        net.hybridize()
        seconds = slow if next(workers) % len(devices) == 0 else fast
        net.register_forward_hook(lambda *_: time.sleep(seconds))
        return net

    found = {}
    for mode in modes:
        parallel = asynchronous.Asynchronous(
            make_net, gluon.loss.SoftmaxCrossEntropyLoss(), devices, mode, "sgd", {"learning_rate": 0.05}
        )
        parallel.train(data[:3])  # the first pass makes what later ones reuse
        done = parallel.train(data)
        store = asynchronous.create_store(mode, np.zeros(1), 3, asynchronous.rules.sgd, 0.1)
        virtual = [simulator.Worker(simulator.steady(slow if number == 0 else fast)) for number in range(3)]
        trace = simulator.simulate(store, lambda weights, batch: (weights, 1), virtual, data)
        found[mode] = done.updates / done.seconds, store.version / trace.seconds
    return found


def facts(outcomes, numbers, delays, deaths, real, far):
    """What is known of these methods, and whether this run shows it."""
    seconds = {mode: {slow: outcome.seconds for slow, outcome in found.items()} for mode, found in delays.items()}
    by_number = [outcome.accuracy for outcome in numbers["async"].values()]
    crowded = sorted(numbers["async"])[-2]
    stale = {mode: found[crowded].accuracy for mode, found in numbers.items()}
    order = {side: sorted(real, key=lambda mode: real[mode][side]) for side in (0, 1)}
    most = max(outcome.updates for outcome in outcomes.values())
    return {
        "sync is as slow as its slowest worker": abs(seconds["sync"][16] / seconds["sync"][4] - 4) < 0.4,
        "async is not": seconds["async"][16] < 1.5 * seconds["async"][1],
        "at equal epochs accuracy falls with staleness": max(by_number[-2:]) < min(by_number[:3]),
        "ssp recovers part of it": stale["ssp:1"] > stale["async"],
        "dc recovers part of it": stale["dc:10"] > stale["async"],
        "async makes the most updates per second": outcomes["async"].updates >= most,
        "a sync step of 8 workers is one step on the 8-fold batch": far < 1e-6,
        "a death that nobody notices stops sync, not async": "ever" in deaths["sync"] and "on w" in deaths["async"],
        "the real run has the simulator's order": order[0] == order[1],
    }


def grid(found, title):
    """One row per mode: final accuracy, seconds to 90 % and mean staleness at each number of workers, or delay."""
    columns = list(next(iter(found.values())))
    lines = [f"{title:26}" + "".join(f"{column:>8}" for column in columns)]
    for mode, outcomes in found.items():
        lines.append(f"{mode:10} accuracy        " + "".join(f"{o.accuracy:8.1%}" for o in outcomes.values()))
        lines.append(f"{'':10} seconds to 90 % " + "".join(f"{as_seconds(o.goal):>8}" for o in outcomes.values()))
        lines.append(f"{'':10} staleness       " + "".join(f"{o.staleness:8.1f}" for o in outcomes.values()))
    return "\n".join(lines)


def as_seconds(seconds):
    return f"{seconds:.0f} s" if seconds == seconds else "-"


def table(outcomes):
    lines = [f"{'mode':10} {'seconds':>8} {'updates/s':>10} {'staleness':>10} {'to 90 %':>9} {'accuracy':>9}"]
    for mode, outcome in outcomes.items():
        lines.append(
            f"{mode:10} {outcome.seconds:8.0f} {outcome.updates:10.2f} {outcome.staleness:10.1f} "
            f"{as_seconds(outcome.goal):>9} {outcome.accuracy:9.1%}"
        )
    return "\n".join(lines)


def by_name(outcomes):
    return {key: outcome._asdict() for key, outcome in outcomes.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8, help="of each mode, on the virtual clock (8)")
    parser.add_argument("--slow", type=float, default=4.0, help="how many times slower the first worker is")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the digits (8)")
    parser.add_argument("--seeds", type=int, default=5, help="runs that each number is the mean of")
    parser.add_argument("--quick", action="store_true", help="three runs instead")
    parser.add_argument("--output", default="runs/compare_sync_async", help="folder for the picture and the numbers")
    options = parser.parse_args()
    options.numbers = [1, 2, 4, 8, 12]
    if options.quick:
        options.seeds = 3
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)

    problem = load()
    outcomes, curves = compare_modes(problem, options)
    numbers = compare_numbers(problem, options)
    delays = compare_delays(problem, options)
    deaths = compare_deaths(options)
    real, far = run_for_real(problem), one_large_step(problem)

    print(f"{options.workers} workers, the first {options.slow:g} times slower; {options.epochs} epochs; virtual time")
    print(table(outcomes))
    print("\n" + grid(numbers, "workers, all equally fast"))
    print("\n" + grid(delays, "one is so much slower"))
    print("\none worker dies at its tenth step, and nobody notices:")
    for mode, what in deaths.items():
        print(f"  {mode:8} {what}")
    print("\nupdates per second with MXNet on 3 CPU devices, the first made slow, and as simulated:")
    for mode, (measured, simulated) in real.items():
        print(f"  {mode:8} {measured:7.1f} {simulated:7.1f}")
    shown = facts(outcomes, numbers, delays, deaths, real, far)
    print("\nwhat is known, and whether this run shows it:")
    for fact, holds in shown.items():
        print(f"  {'yes' if holds else 'NO ':3}  {fact}")

    traces = {mode: run(mode, problem, workers_of(4, options.slow), 1, 0)[2] for mode in ("async", "ssp:1", "sync")}
    picture.draw(folder / "sync_async.png", options, GOAL, traces, curves, numbers, delays)
    record = {
        "modes": by_name(outcomes), "numbers": {mode: by_name(found) for mode, found in numbers.items()},
        "delays": {mode: by_name(found) for mode, found in delays.items()}, "deaths": deaths, "real": real,
        "facts": shown,
    }  # fmt: skip
    (folder / "sync_async.json").write_text(json.dumps(record, indent=2, default=bool), encoding="utf-8")
    print(f"\npicture: {folder / 'sync_async.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
