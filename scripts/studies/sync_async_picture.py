"""The picture of sync_async.py."""

from __future__ import annotations

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter

COLOURS = {"sync": "#1f2933", "backup": "#7b8794", "ssp": "#2a6f97", "local": "#588157", "elastic": "#b8860b",
           "async": "#c8102e", "dc": "#e07a5f"}  # fmt: skip


def colour(mode):
    return COLOURS[mode.partition(":")[0]]


def draw(path, options, goal, traces, curves, numbers, delays):
    """Six panels: what waiting looks like, what it costs, what not waiting costs, and both together.

    Args:
        goal: the accuracy whose time is drawn.
        traces: {mode: what four workers did}.
        curves: {mode: (seconds, accuracies)}.
        numbers, delays: {mode: {number of workers, or delay: outcome}}.
    """
    figure = Figure(figsize=(15.5, 8.2), layout=ConstrainedLayoutEngine(wspace=0.04, hspace=0.06), facecolor="white")
    FigureCanvasAgg(figure)
    (bars_of, time_of, goal_of), (number_of, delay_of, both) = figure.subplots(2, 3)

    def plain(axes, title, xlabel, ylabel=""):
        axes.set_title(title, fontsize=11, loc="left", fontweight="bold", color="#1f2933")
        axes.set_xlabel(xlabel, fontsize=9, color="#52606d")
        axes.set_ylabel(ylabel, fontsize=9, color="#52606d")
        axes.tick_params(which="both", labelsize=8, colors="#52606d", length=0)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in axes.spines.values():
            side.set_visible(False)

    def lines(axes, found, value, percent=False):
        """One line per mode over doubling numbers, its name beside its last point, apart from the others' names."""
        ends = []
        for mode, outcomes in found.items():
            points = [(at, value(o)) for at, o in outcomes.items() if np.isfinite(value(o))]
            if points:
                axes.plot(*zip(*points), color=colour(mode), linewidth=2, marker="o", markersize=4)
                ends.append((points[-1][1], points[-1][0], mode))
        for number, mode in enumerate(mode for mode in found if mode not in [end[2] for end in ends]):
            axes.text(0.03, 0.95 - 0.06 * number, f"{mode} never gets there", transform=axes.transAxes, fontsize=8.5,
                      color=colour(mode))  # fmt: skip
        ticks = list(next(iter(found.values())))
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlim(0.9, ticks[-1] * 1.7)
        axes.set_ylim(0, 1.04 if percent else None)
        if percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        high, room = np.inf, axes.get_ylim()[1] / 18
        for y, at, mode in sorted(ends, reverse=True):
            high = min(y, high - room) if at == ticks[-1] else y
            axes.text(at * 1.07, high, mode, fontsize=8.5, color=colour(mode), va="center")

    plain(bars_of, f"Four workers, the first {options.slow:g} times slower", "seconds")
    bars_of.grid(visible=False)
    rows, names = 0.0, []
    for mode, trace in traces.items():
        for number in (3, 2, 1, 0):
            bars = [(step.start, step.end - step.start) for step in trace.steps if step.worker == number]
            bars_of.broken_barh(bars, (rows, 0.78), facecolors=colour(mode), edgecolors="white", linewidth=1)
            rows += 1
        names.append((rows - 2.1, mode))
        rows += 0.8
    bars_of.set_xlim(0, 5.2 * options.slow)
    bars_of.set_yticks([y for y, _ in names], [name for _, name in names], fontsize=10)

    slower = f"how many times slower one of {options.workers} workers is"
    plain(time_of, "Waiting costs time", slower, "seconds per epoch")
    lines(time_of, delays, lambda outcome: outcome.seconds / options.epochs)
    plain(goal_of, "Which pays in the end", slower, f"seconds until the accuracy is {goal:.0%}")
    lines(goal_of, delays, lambda outcome: outcome.goal)
    plain(number_of, f"Not waiting costs accuracy, after {options.epochs} epochs",
          "number of workers, all equally fast")  # fmt: skip
    lines(number_of, numbers, lambda outcome: outcome.accuracy, percent=True)
    for count, outcome in list(numbers["async"].items())[1:]:
        age = f"{outcome.staleness:.0f} update{'s' * (outcome.staleness > 1.5)} old"
        number_of.annotate(age, (count, outcome.accuracy), (-5, -13), textcoords="offset points", fontsize=7.5,
                           color=colour("async"), ha="right")  # fmt: skip
    plain(delay_of, "... also where one worker is slow", slower)
    lines(delay_of, delays, lambda outcome: outcome.accuracy, percent=True)

    plain(both, f"Both: {options.workers} workers, one {options.slow:g} times slower", "seconds", "accuracy")
    for mode in ("elastic", "backup:1", "sync", "ssp:1", "dc:10", "async"):  # as they end, from above
        seconds, values = curves[mode]
        both.plot(seconds, values, color=colour(mode), linewidth=1.8, label=mode)
    both.set_ylim(0, 1.04)
    both.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    both.legend(fontsize=8.5, frameon=False, loc="lower right", labelcolor="linecolor", ncols=2)
    figure.savefig(path, dpi=144)
