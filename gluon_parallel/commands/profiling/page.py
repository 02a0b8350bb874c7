"""Page of a profile: one HTML file with plots, which needs no network; its text is in page.html."""

import re
import statistics
from pathlib import Path
from typing import NamedTuple

from .findings import head, rows
from .parts import COLOURS, COMPUTING, DEVICES, LATE, LAUNCHING, MEANING, PARTS, READING, TRANSFER
from .recording import STEP

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
        used={part: MEANING[part] for part, _ in rows(analysis) if part in MEANING},
        bars=_mean_step_bars(analysis), parts=_parts(analysis), step=_median_step_rows(analysis),
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


# A table is its titles, and for each line its words and its bar.


def _parts(analysis):
    titles = ["ms per step", *map(analysis.name, analysis.timelines)]
    return titles, [([part, *(f"{value:.2f}" for value in values)], None) for part, values in rows(analysis)]


def _operators(analysis):
    found = list(analysis.operators().items())[:_NUM_OPERATORS]
    lines = [([name.replace("_backward_", ""), part], [seconds], COLOURS[part]) for (part, name), seconds in found]
    return _ranking(["operator", "pass", "per step"], lines)


def _layers(analysis):
    found = analysis.layers[:_NUM_LAYERS]
    if len(analysis.recordings) == 1:
        lines = [([one.name], [one.devices], COLOURS[DEVICES]) for one in found]
        return _ranking(["layer", "for devices"], lines)
    lines = [([one.name], [one.devices, one.processes], COLOURS[LATE]) for one in found]
    return _ranking(["layer", "for devices", "for processes"], lines)


def _ranking(titles, lines):
    """A table of lines (words, seconds, colour); the bar is as long as the seconds of its line together."""
    longest = max((sum(seconds) for _, seconds, _ in lines), default=0) or 1
    return [*titles, ""], [
        ([*words, *(f"{one * 1e3:.2f} ms" for one in seconds)], (f"{sum(seconds) / longest:.1%}", colour))
        for words, seconds, colour in lines
    ]


class Drawing(NamedTuple):
    """A drawing in its own units, which the page stretches to its width and to `height` pixels."""

    rectangles: list  # of (part, x, y, width, height, text), in the drawing's units
    width: float  # in the drawing's units
    depth: float  # from top to bottom, in the drawing's units
    height: int  # on the page, in pixels


def _bar(pieces, whole, height=26):
    """A horizontal bar, `height` pixels high, of pieces (part, begin, end, text); its right end is at `whole`."""
    scale = _WIDTH / whole
    rectangles = [
        (part, begin * scale, 0, (end - begin) * scale, 1, text)
        for part, begin, end, text in pieces
        if (end - begin) * scale >= 0.1  # narrower ones cannot be seen
    ]
    return Drawing(rectangles, _WIDTH, 1, height)


def _mean_step_bars(analysis):
    """(name, drawing, duration) for each device: the mean duration of each part of a step."""
    longest = max(timeline.seconds() for timeline in analysis.timelines)
    for timeline in analysis.timelines:
        begin, pieces = 0.0, []
        for part in PARTS:
            seconds = timeline.seconds(part)
            pieces.append((part, begin, begin + seconds, f"{part}: {seconds * 1e3:.2f} ms"))
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
        inside = [(part, max(first, begin), min(last, end)) for part, first, last in intervals]
        pieces = [
            (part, first - begin, last - begin, f"{part}: {(last - first) / 1e6:.2f} ms")
            for part, first, last in inside
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
