"""Files of a profile: the page with plots, whose text is in page.html, and the trace of all processes for Perfetto."""

import itertools
import json
import re
import statistics
from pathlib import Path
from typing import NamedTuple

from .activities import ACTIVITIES, COLOURS, COMPUTING, DEVICES, LATE, LAUNCHING, MEANING, READING, TRANSFER
from .findings import head, rows
from .recording import STEP, is_exchange

_NUM_OPERATORS, _NUM_LAYERS = 12, 10
_WIDTH = 2000  # of a bar, in its own units
_TYPED = re.compile(  # what is to be typed, and shown as code
    r"((?:gp\.|set_)[\w.]+(?:\([^()]*\))?|--devices [\w:]+|\w+\([\w.=]+\)|[A-Z]+_[A-Z_]+|\w+=(?:True|\.\.\.))"
)


def page(analysis, findings):
    """The page of an :class:`.Analysis` and sentences about it, as text."""
    import jinja2  # here: only profiles need it

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return environment.get_template("page.html").render(
        colours=COLOURS, head=head(analysis), cards=_cards(analysis),
        findings=[_TYPED.split(sentence) for sentence in findings],
        used={activity: MEANING[activity] for activity, _ in rows(analysis) if activity in MEANING},
        bars=_mean_step_bars(analysis), activities=_activity_table(analysis), step=_median_step_rows(analysis),
        steps=_step_chart(analysis), operators=_operators(analysis), layers=_layers(analysis),
    )  # fmt: skip


def _cards(analysis):
    step, exchanged = analysis.seconds(), sum(one.exchanged for one in analysis.timelines)
    busy = [cores.busy for cores in analysis.cores()]
    cards = [("a step", f"{step * 1e3:.1f} ms"), ("computing", f"{analysis.seconds(*COMPUTING) / step:.0%}")]
    if analysis.samples_per_second:
        cards.append(("samples per second", f"{analysis.samples_per_second:,.0f}"))
    cards.append(("cores busy", f"{statistics.mean(busy):.0%}"))
    if exchanged:
        hidden = sum(one.hidden for one in analysis.timelines)
        cards.append(("of the exchange is hidden", f"{hidden / exchanged:.0%}"))
    return cards


def _ranking(titles, lines):
    """A table, its titles and lines, of (words, seconds, colour); a line's bar is as long as its seconds together."""
    longest = max((sum(seconds) for _, seconds, _ in lines), default=0) or 1
    return [*titles, ""], [
        ([*words, *(f"{one * 1e3:.2f} ms" for one in seconds)], (f"{sum(seconds) / longest:.1%}", colour))
        for words, seconds, colour in lines
    ]


def _activity_table(analysis):
    titles = ["ms per step", *map(analysis.name, analysis.timelines)]
    return titles, [([activity, *(f"{value:.2f}" for value in values)], None) for activity, values in rows(analysis)]


def _operators(analysis):
    found = list(analysis.operators().items())[:_NUM_OPERATORS]
    lines = [
        ([name.replace("_backward_", ""), activity], [seconds], COLOURS[activity])
        for (activity, name), seconds in found
    ]
    return _ranking(["operator", "pass", "per step"], lines)


def _layers(analysis):
    alone = len(analysis.recordings) == 1
    names, colour = (["devices"], COLOURS[DEVICES]) if alone else (["devices", "processes"], COLOURS[LATE])
    lines = [([one.name], [getattr(one, name) for name in names], colour) for one in analysis.layers[:_NUM_LAYERS]]
    return _ranking(["layer", *(f"for {name}" for name in names)], lines)


class Drawing(NamedTuple):
    """A drawing in units of its own, which the page stretches to its width and to `height` pixels."""

    rectangles: list  # of (activity, x, y, width, height, text)
    width: float
    depth: float  # from top to bottom
    height: int  # on the page, in pixels


def _bar(pieces, whole, height=26):
    """A horizontal bar, `height` pixels high, of pieces (activity, begin, end, text); its right end is at `whole`."""
    scale = _WIDTH / whole
    rectangles = [
        (activity, begin * scale, 0, (end - begin) * scale, 1, text)
        for activity, begin, end, text in pieces
        if (end - begin) * scale >= 0.1  # narrower ones cannot be seen
    ]
    return Drawing(rectangles, _WIDTH, 1, height)


def _mean_step_bars(analysis):
    """(name, drawing, duration) for each device: the mean duration of each activity of a step."""
    longest = max(timeline.seconds() for timeline in analysis.timelines)
    for timeline in analysis.timelines:
        begin, pieces = 0.0, []
        for activity in ACTIVITIES:
            seconds = timeline.seconds(activity)
            pieces.append((activity, begin, begin + seconds, f"{activity}: {seconds * 1e3:.2f} ms"))
            begin += seconds
        yield analysis.name(timeline), _bar(pieces, longest), f"{timeline.seconds() * 1e3:.1f} ms"


def _median_step_rows(analysis):
    """What all devices and processes do in the step whose duration on the first device is the median.

    Returns {"rows": list of (name, drawing), "ticks": texts of the axis below}.
    """
    durations = analysis.timelines[0].durations()
    number = durations.index(statistics.median_low(durations))
    begin = min(timeline.steps[number][0].begin for timeline in analysis.timelines)
    end = max(timeline.steps[number][-1].end for timeline in analysis.timelines)

    def bar_of_step(intervals, height=26):
        inside = [(activity, max(first, begin), min(last, end)) for activity, first, last in intervals]
        pieces = [
            (activity, first - begin, last - begin, f"{activity}: {(last - first) / 1e6:.2f} ms")
            for activity, first, last in inside
            if first < last
        ]
        return _bar(pieces, end - begin, height)

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


def _step_chart(analysis):
    """A column for each step, with the activities' mean over all devices: {"drawing", "scale": texts beside it}."""
    columns = []
    for number in range(analysis.num_steps):
        totals = dict.fromkeys(ACTIVITIES, 0.0)
        for timeline in analysis.timelines:
            for activity, begin, end in timeline.steps[number]:
                totals[activity] += (end - begin) / 1e6 / len(analysis.timelines)
        columns.append(totals)
    highest = max(sum(totals.values()) for totals in columns)
    rectangles = []
    for number, totals in enumerate(columns):
        top = highest
        for activity in ACTIVITIES:
            top -= totals[activity]
            text = f"step {number + 1}, {activity}: {totals[activity]:.2f} ms"
            rectangles.append((activity, number + 0.06, top, 0.88, totals[activity], text))
    drawing = Drawing(rectangles, len(columns), round(highest, 3), 180)
    return {"drawing": drawing, "scale": [f"{highest:.1f} ms", f"{highest / 2:.1f}", "0"]}


def write_trace(path, analysis):
    """Write the trace of the recordings of an :class:`.Analysis`."""
    start = min(one.begin for one in analysis.recordings)
    events = [event for pair in zip(analysis.recordings, analysis.exchanges) for event in _events(*pair, start)]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _events(recording, found, start):
    """The events of one process: rows for its script, for each device, and for the exchanges."""
    rank, numbers = recording.rank, itertools.count(1)

    def rows(title, slices):
        """Each of the slices (name, begin, end, slices inside it), in the first row that is free then."""
        ends: list[int] = []
        ids: list[int] = []
        for name, begin, end, inside in sorted(slices, key=lambda one: one[1]):
            row = next((row for row, last in enumerate(ends) if last <= begin), len(ends))
            if row == len(ends):
                ends.append(0)
                ids.append(next(numbers))
                about = {"ph": "M", "pid": rank, "tid": ids[row]}
                yield {**about, "name": "thread_name", "args": {"name": title}}
                yield {**about, "name": "thread_sort_index", "args": {"sort_index": ids[row]}}
            ends[row] = end
            for what, first, last in [(name, begin, end), *inside]:
                if first < last or what == name:
                    times = {"ts": (first - start) / 1e3, "dur": (last - first) / 1e3}
                    yield {"ph": "X", "pid": rank, "tid": ids[row], "name": what, **times}

    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    steps = itertools.count(1)
    names = [f"step {next(steps)}" if span.what == STEP else span.what for span in recording.spans]
    yield from rows("script", [(name, span.begin, span.end, ()) for name, span in zip(names, recording.spans)])
    for number, device in enumerate(recording.devices):
        operators = [one for one in recording.operators if one.device == number]
        runs = [one for one in operators if not is_exchange(one.name)]
        yield from rows(device, [(one.name, one.begin, one.end, ()) for one in runs])
        passes = [one for one in recording.passes if one.device == device]
        slices = [
            (f"{one.layer}, {one.direction}", one.began, one.ended, [
                ("waiting for other devices", one.arrived, one.complete),
                ("exchange with other processes", one.complete, one.reduced),
            ])
            for one in passes
        ]  # fmt: skip
        yield from rows(f"{device}, SyncBatchNorm", slices)
    slices = [
        (one.what, one.ready, one.end, [("waiting for a late process", one.ready, one.all_ready)])
        for one in found if one.is_operator
    ]  # fmt: skip
    yield from rows("exchange with processes", slices)
