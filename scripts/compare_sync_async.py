"""What waiting costs and what not waiting costs: synchronous, asynchronous and between, with one slow worker.

    python scripts/compare_sync_async.py                      about a minute on two cores: a table and a picture
    python scripts/compare_sync_async.py --quick              fewer repetitions
    python scripts/compare_sync_async.py --workers 16 --slow 8

A small net learns handwritten digits. The gradients are real; the clock is virtual, so every number but those of the
last section follows from the seed. The last section trains with MXNet, on devices one of which is made slow.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

asynchronous = gp.asynchronous

BATCH, HIDDEN, MOMENTUM = 16, 32, 0.8
LR_PER_WORKER = 0.15 / 8  # so that a round of 8 workers has 0.15, which is bold: staleness shows
GOAL = 0.9
MODES = ("sync", "backup:1", "ssp:1", "ssp:4", "local:4", "elastic", "async", "dc:10")
COLOURS = {
    "sync": "#1f2933", "backup": "#7b8794", "ssp": "#2a6f97", "local": "#588157", "elastic": "#b8860b",
    "async": "#c8102e", "dc": "#e07a5f",
}  # fmt: skip


class Problem(NamedTuple):
    """Digits at half their size, and a net of one hidden layer as one flat array."""

    x: np.ndarray  # (N, 196)
    y: np.ndarray  # (N,)
    test_x: np.ndarray
    test_y: np.ndarray


SHAPES = [(196, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,)]
ENDS = np.cumsum([int(np.prod(shape)) for shape in SHAPES])


def load():
    data = gp.datasets.load("digits")
    x, test_x = (part.images[:, 0, ::2, ::2].reshape(-1, 196) for part in (data.train, data.test))
    return Problem(x, data.train.labels, test_x, data.test.labels)


def initial(seed):
    random = np.random.RandomState(seed)
    arrays = [random.randn(*s) * np.sqrt(2 / s[0]) if len(s) > 1 else np.zeros(s) for s in SHAPES]
    return np.concatenate([array.ravel() for array in arrays]).astype(np.float32)


def forward(weights, x):
    w1, b1, w2, b2 = (part.reshape(shape) for part, shape in zip(np.split(weights, ENDS[:-1]), SHAPES))
    hidden = np.maximum(x @ w1 + b1, 0)
    return hidden, hidden @ w2 + b2, w2


def gradient(weights, batch):
    """The gradient of the mean cross entropy over a batch, and the batch's size."""
    x, y = batch
    hidden, logits, w2 = forward(weights, x)
    wrong = np.exp(logits - logits.max(axis=1, keepdims=True))
    wrong /= wrong.sum(axis=1, keepdims=True)
    wrong[np.arange(len(y)), y] -= 1
    wrong /= len(y)
    below = (wrong @ w2.T) * (hidden > 0)
    parts = [x.T @ below, below.sum(axis=0), hidden.T @ wrong, wrong.sum(axis=0)]
    return np.concatenate([part.ravel() for part in parts]), len(y)


def accuracy(weights, problem):
    return float((forward(weights, problem.test_x)[1].argmax(axis=1) == problem.test_y).mean())


def batches(problem, epochs, seed):
    for epoch in range(epochs):
        order = np.random.RandomState([seed, epoch]).permutation(len(problem.y))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            yield problem.x[chosen], problem.y[chosen]


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
    store = asynchronous.create_store(mode, initial(seed), len(workers), update, LR_PER_WORKER * len(workers))
    every = max(1, len(problem.y) // BATCH * epochs // points) if points else 10**9
    curve, pushes = [], 0

    def observe(now, store):
        nonlocal pushes
        if pushes % every == 0:
            curve.append((now, accuracy(store.weights, problem)))
        pushes += 1

    with np.errstate(over="ignore", invalid="ignore"):  # what diverges may do so; its accuracy tells
        trace = asynchronous.simulate(store, gradient, workers, batches(problem, epochs, seed), seed, observe=observe)
        final = accuracy(store.weights, problem)
    reached = [now for now, value in curve if value >= GOAL]
    goal = reached[0] if reached else float("nan")
    outcome = Outcome(trace.seconds, store.version / trace.seconds, store.staleness.mean, final, goal)
    return outcome, curve, trace


def mean(outcomes):
    return Outcome(*(float(np.mean(values)) for values in zip(*outcomes)))


def workers_of(count, slow):
    """`count` workers with steps of about a second, of which the first takes `slow` times as long."""
    uneven = asynchronous.uneven
    return [asynchronous.Worker(uneven(slow if number == 0 else 1.0, spread=0.3)) for number in range(count)]


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
    """{mode: [(number of workers, mean staleness, mean accuracy)]}; every worker is as fast as the others."""
    found: dict[str, list] = {}
    for mode in modes:
        found[mode] = []
        for count in options.numbers:
            workers = workers_of(count, slow=1.0)
            runs = [run(mode, problem, workers, options.epochs, seed)[0] for seed in range(options.seeds)]
            found[mode].append((count, mean(runs).staleness, mean(runs).accuracy))
    return found


def compare_delays(problem, options, modes=("sync", "ssp:1", "backup:1", "async")):
    """{mode: [(how much slower one worker is, seconds per epoch)]}; nothing is learnt here, only waited."""
    found: dict[str, list] = {}
    num = len(problem.y) // BATCH * 4
    for mode in modes:
        found[mode] = []
        for slow in (1, 2, 4, 8, 16):
            store = asynchronous.create_store(mode, np.zeros(1), options.workers, asynchronous.rules.sgd, 0.1)
            workers = workers_of(options.workers, slow)
            trace = asynchronous.simulate(store, lambda weights, batch: (weights, 1), workers, range(num))
            found[mode].append((slow, trace.seconds / 4))
    return found


def compare_deaths(options, modes=("sync", "ssp:1", "async")):
    """{mode: what becomes of it} when one worker dies at its tenth step and nobody notices."""
    found = {}
    for mode in modes:
        workers = workers_of(options.workers, 1.0)
        workers[-1] = workers[-1]._replace(dies_at=10)
        store = asynchronous.create_store(mode, np.zeros(1), options.workers, asynchronous.rules.sgd, 0.1)
        trace = asynchronous.simulate(store, lambda weights, batch: (weights, 1), workers, range(400))
        found[mode] = f"waits for ever from {trace.seconds:.0f} s on" if trace.stalled else "goes on without it"
    return found


def run_for_real(problem, modes=("sync", "ssp:1", "backup:1", "async"), fast=0.02, slow=0.16):
    """{mode: (updates per second with MXNet on 3 devices, one of them slow; the same on the virtual clock)}."""
    devices = gp.devices("cpu:3")
    data = list(batches(problem, 1, seed=0))[:36]

    def make_net():
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(HIDDEN, in_units=196, activation="relu"), gluon.nn.Dense(10, in_units=HIDDEN))
        net.initialize(mx.init.Xavier())
        net.hybridize()
        return net

    found = {}
    for mode in modes:
        parallel = asynchronous.Asynchronous(
            make_net, gluon.loss.SoftmaxCrossEntropyLoss(), devices, mode, "sgd", {"learning_rate": 0.05},
            delay=lambda worker: time.sleep(slow if worker == 0 else fast),
        )  # fmt: skip
        parallel.train(data[:6])  # the first pass makes what later ones reuse
        done = parallel.train(data)
        store = asynchronous.create_store(mode, np.zeros(1), 3, asynchronous.rules.sgd, 0.1)
        virtual = [asynchronous.Worker(asynchronous.steady(slow if number == 0 else fast)) for number in range(3)]
        trace = asynchronous.simulate(store, lambda weights, batch: (weights, 1), virtual, data)
        found[mode] = done.updates / done.seconds, store.version / trace.seconds
    return found


def facts(outcomes, numbers, delays, deaths, real):
    """What is known of these methods, and whether this run shows it."""
    sync, asyn = delays["sync"], delays["async"]
    by_staleness = [value for _, _, value in numbers["async"]]
    ahead = {mode: [value for _, _, value in found][-2] for mode, found in numbers.items()}
    order = {side: sorted(real, key=lambda mode: real[mode][side]) for side in (0, 1)}
    most = max(outcome.updates for outcome in outcomes.values())
    return {
        "sync is as slow as its slowest worker": sync[2][1] / sync[0][1] > 2.2 and sync[4][1] > 3 * sync[2][1],
        "async is not": asyn[4][1] < 1.5 * asyn[0][1],
        "at equal epochs accuracy falls with staleness": max(by_staleness[-2:]) < min(by_staleness[:3]),
        "ssp recovers part of it": ahead["ssp:1"] > ahead["async"],
        "dc recovers part of it": ahead["dc:10"] > ahead["async"],
        "async makes the most updates per second": outcomes["async"].updates >= most,
        "a death that nobody notices stops sync, not async": "ever" in deaths["sync"] and "on w" in deaths["async"],
        "the real run has the simulator's order": order[0] == order[1],
    }


def table(outcomes):
    lines = [f"{'mode':10} {'seconds':>8} {'updates/s':>10} {'staleness':>10} {'to 90 %':>9} {'accuracy':>9}"]
    for mode, outcome in outcomes.items():
        goal = f"{outcome.goal:.0f} s" if outcome.goal == outcome.goal else "-"
        lines.append(
            f"{mode:10} {outcome.seconds:8.0f} {outcome.updates:10.2f} {outcome.staleness:10.1f} {goal:>9} "
            f"{outcome.accuracy:9.1%}"
        )
    return "\n".join(lines)


def colour(mode):
    return COLOURS[mode.split(":")[0]]


def draw(path, options, problem, curves, numbers, delays):
    """Four panels: what waiting looks like, what it costs, what not waiting costs, and both together."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(11.5, 8.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    (top_left, top_right), (left, right) = figure.subplots(2, 2)

    def plain(axes, title, xlabel, ylabel=""):
        axes.set_title(title, fontsize=11, loc="left", fontweight="bold", color="#1f2933")
        axes.set_xlabel(xlabel, fontsize=9, color="#52606d")
        axes.set_ylabel(ylabel, fontsize=9, color="#52606d")
        axes.tick_params(labelsize=8, colors="#52606d", length=0)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in axes.spines.values():
            side.set_visible(False)

    def label_ends(axes, ends, room):
        """Names beside the last points, pushed apart where they would touch."""
        high = np.inf
        for y, x, mode in sorted(ends, reverse=True):
            high = min(y, high - room)
            axes.text(x, high, mode, fontsize=8.5, color=colour(mode), va="center")

    plain(top_left, f"Four workers, the first {options.slow:g} times slower", "seconds")
    top_left.grid(visible=False)
    rows, names = 0.0, []
    for mode in ("async", "ssp:1", "sync"):
        trace = run(mode, problem, workers_of(4, options.slow), 1, 0)[2]
        for number in (3, 2, 1, 0):
            bars = [(step.start, step.end - step.start) for step in trace.steps if step.worker == number]
            top_left.broken_barh(bars, (rows, 0.78), facecolors=colour(mode), edgecolors="white", linewidth=1)
            rows += 1
        names.append((rows - 2.1, mode))
        rows += 0.8
    top_left.set_xlim(0, 5.2 * options.slow)
    top_left.set_yticks([y for y, _ in names], [name for _, name in names], fontsize=10)

    plain(top_right, "Waiting costs time", "how many times slower one worker is", "seconds per epoch")
    ends = []
    for mode, points in delays.items():
        top_right.plot(*zip(*points), color=colour(mode), linewidth=2, marker="o", markersize=4)
        ends.append((points[-1][1], points[-1][0] * 1.06, mode))
    top_right.set_xscale("log", base=2)
    top_right.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    top_right.set_xlim(0.9, 25)
    top_right.set_ylim(bottom=0)
    label_ends(top_right, ends, room=top_right.get_ylim()[1] / 18)

    plain(left, f"Not waiting costs accuracy, after {options.epochs} epochs", "number of workers, all equally fast")
    left.set_ylim(0, 1.02)
    ends = []
    for mode, points in numbers.items():
        left.plot([p[0] for p in points], [p[2] for p in points], color=colour(mode), linewidth=2, marker="o",
                  markersize=4)  # fmt: skip
        ends.append((points[-1][2], points[-1][0] * 1.06, mode))
    for count, staleness, value in numbers["async"][1:]:
        age = f"{staleness:.0f} update{'s' * (staleness > 1.5)} old"
        left.annotate(age, (count, value), (-5, -13), textcoords="offset points", fontsize=7.5, color=colour("async"),
                      ha="right")  # fmt: skip
    left.set_xscale("log", base=2)
    left.set_xticks(options.numbers, [str(number) for number in options.numbers])
    left.set_xlim(0.9, options.numbers[-1] * 1.6)
    left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    label_ends(left, ends, room=(left.get_ylim()[1] - left.get_ylim()[0]) / 18)

    title = f"Both: {options.workers} workers, one {options.slow:g} times slower"
    plain(right, title, "seconds", "accuracy")
    for mode in ("elastic", "backup:1", "sync", "ssp:1", "dc:10", "async"):  # as they end, from above
        seconds, values = curves[mode]
        right.plot(seconds, values, color=colour(mode), linewidth=1.8, label=mode)
    right.set_ylim(0, 1.02)
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    right.legend(fontsize=8.5, frameon=False, loc="lower right", labelcolor="linecolor", ncols=2)
    figure.savefig(path, dpi=144)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--slow", type=float, default=4.0, help="how many times slower the first worker is")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=5, help="runs that each number is the mean of")
    parser.add_argument("--quick", action="store_true", help="three of them")
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
    real = run_for_real(problem)

    print(f"{options.workers} workers, the first {options.slow:g} times slower; {options.epochs} epochs; virtual time")
    print(table(outcomes))
    print("\none worker dies at its tenth step, and nobody notices:")
    for mode, what in deaths.items():
        print(f"  {mode:8} {what}")
    print("\nupdates per second with MXNet on 3 CPU devices, the first made slow, and as simulated:")
    for mode, (measured, simulated) in real.items():
        print(f"  {mode:8} {measured:7.1f} {simulated:7.1f}")
    shown = facts(outcomes, numbers, delays, deaths, real)
    print("\nwhat is known, and whether this run shows it:")
    for fact, holds in shown.items():
        print(f"  {'yes' if holds else 'NO ':3}  {fact}")

    draw(folder / "sync_async.png", options, problem, curves, numbers, delays)
    record = {
        "modes": {mode: outcome._asdict() for mode, outcome in outcomes.items()},
        "numbers": numbers, "delays": delays, "deaths": deaths, "real": real, "facts": shown,
    }  # fmt: skip
    (folder / "sync_async.json").write_text(json.dumps(record, indent=2, default=bool), encoding="utf-8")
    print(f"\npicture: {folder / 'sync_async.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
