"""Plots of the page as rectangles; the template draws them."""

import statistics
from typing import NamedTuple

from .parts import LATE, LAUNCHING, PARTS, READING, TRANSFER
from .recording import STEP

_WIDTH = 2000  # of a bar, in its own units


class Drawing(NamedTuple):
    """A drawing in its own units, which the page stretches to its width and to `height` pixels."""

    rectangles: list  # of (part, x, y, width, height, text), in the drawing's units
    width: float  # in the drawing's units
    depth: float  # from top to bottom, in the drawing's units
    height: int  # on the page, in pixels


def bar(pieces, whole, height=26):
    """A horizontal bar.

    Args:
        pieces: list of (part, begin, end, text).
        whole: the value at the right end, in the unit of begin and end.
        height: in pixels.
    """
    scale = _WIDTH / whole
    rectangles = [
        (part, begin * scale, 0, (end - begin) * scale, 1, text)
        for part, begin, end, text in pieces
        if (end - begin) * scale >= 0.1  # narrower ones cannot be seen
    ]
    return Drawing(rectangles, _WIDTH, 1, height)


def mean_step_bars(analysis):
    """(name, drawing, duration) for each device: the mean duration of each part of a step."""
    longest = max(timeline.seconds() for timeline in analysis.timelines)
    for timeline in analysis.timelines:
        begin, pieces = 0.0, []
        for part in PARTS:
            seconds = timeline.seconds(part)
            pieces.append((part, begin, begin + seconds, f"{part}: {seconds * 1e3:.2f} ms"))
            begin += seconds
        yield analysis.name(timeline), bar(pieces, longest), f"{timeline.seconds() * 1e3:.1f} ms"


def median_step_rows(analysis):
    """What all devices and processes do in the step whose duration on the first device is the median.

    Returns:
        {"rows": list of (name, drawing), "ticks": texts of the axis below}.
    """
    durations = analysis.timelines[0].durations()
    number = durations.index(statistics.median_low(durations))
    begin = min(timeline.steps[number][0].begin for timeline in analysis.timelines)
    end = max(timeline.steps[number][-1].end for timeline in analysis.timelines)

    def bar_of_step(intervals, height=26):
        inside = [(part, max(first, begin), min(last, end)) for part, first, last in intervals]
        pieces = [
            (part, first - begin, last - begin, f"{part}: {(last - first) / 1e6:.2f} ms")
            for part, first, last in inside
            if first < last
        ]
        return bar(pieces, end - begin, height)

    rows = []
    for recording, exchanges in zip(analysis.recordings, analysis.exchanges):
        prefix = f"rank {recording.rank}, " if len(analysis.recordings) > 1 else ""
        for timeline in analysis.timelines:
            if timeline.rank == recording.rank:
                rows.append((f"{prefix}{timeline.device}", bar_of_step(timeline.steps[number])))
        python = [(LAUNCHING if span.what == STEP else READING, span.begin, span.end) for span in recording.spans]
        rows.append((f"{prefix}Python", bar_of_step(python, 10)))
        gradients = [one for one in exchanges if one.is_gradient]
        if gradients:
            late = [(LATE, one.ready, one.all_ready) for one in gradients]
            moving = [(TRANSFER, one.all_ready, one.end) for one in gradients]
            rows.append((f"{prefix}exchange", bar_of_step([*late, *moving], 10)))
    ticks = [f"{(end - begin) / 1e6 * quarter / 4:.1f}" for quarter in range(5)]
    return {"rows": rows, "ticks": [*ticks[:-1], f"{ticks[-1]} ms"]}


def step_chart(analysis):
    """A column for each step, with the parts' mean over all devices: {"drawing", "scale": texts beside it}."""
    columns = []
    for number in range(analysis.num_steps):
        totals = dict.fromkeys(PARTS, 0.0)
        for timeline in analysis.timelines:
            for part, begin, end in timeline.steps[number]:
                totals[part] += (end - begin) / 1e6 / len(analysis.timelines)
        columns.append(totals)
    highest = max(sum(totals.values()) for totals in columns)
    rectangles = []
    for number, totals in enumerate(columns):
        top = highest
        for part in PARTS:
            top -= totals[part]
            text = f"step {number + 1}, {part}: {totals[part]:.2f} ms"
            rectangles.append((part, number + 0.06, top, 0.88, totals[part], text))
    drawing = Drawing(rectangles, len(columns), round(highest, 3), 180)
    return {"drawing": drawing, "scale": [f"{highest:.1f} ms", f"{highest / 2:.1f}", "0"]}
