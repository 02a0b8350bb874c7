"""Plots of the page: drawings without text in SVG, which stretch to any width, and their text in HTML."""

import statistics
from html import escape

from .parts import LATE, LAUNCHING, PARTS, READING, TRANSFER
from .recording import STEP
from .style import COLOURS

_WIDTH = 2000  # of a drawing, in its own units


def legend(names):
    """The colours of parts.

    Args:
        names: of the parts.
    """
    items = "".join(f'<li><i style="background:{COLOURS[name]}"></i>{name}</li>' for name in names)
    return f'<ul class="legend">{items}</ul>'


def bar(pieces, whole, height=26):
    """A horizontal bar.

    Args:
        pieces: list of (part, begin, end, text).
        whole: what is the full width.
        height: in pixels.
    """
    rectangles = "".join(
        f'<rect x="{begin / whole * _WIDTH:.1f}" width="{(end - begin) / whole * _WIDTH:.1f}" height="1" '
        f'fill="{COLOURS[part]}"><title>{escape(text)}</title></rect>'
        for part, begin, end, text in pieces
        if (end - begin) / whole * _WIDTH >= 0.1
    )
    return _drawing(f"{_WIDTH} 1", height, rectangles)


def _drawing(size, height, content):
    return f'<svg viewBox="0 0 {size}" preserveAspectRatio="none" style="height:{height}px" role="img">{content}</svg>'


def row(name, drawing, number=""):
    """A drawing with a name before it and a number after it."""
    return f'<div class="row"><span>{escape(name)}</span>{drawing}<span class="number">{number}</span></div>'


def one_step(analysis):
    """What all devices and processes do in the step of median duration."""
    durations = analysis.timelines[0].durations()
    number = durations.index(statistics.median_low(durations))
    begin = min(timeline.steps[number][0].begin for timeline in analysis.timelines)
    end = max(timeline.steps[number][-1].end for timeline in analysis.timelines)

    def drawn(intervals, height=26):
        inside = [(part, max(first, begin), min(last, end)) for part, first, last in intervals]
        pieces = [
            (part, first - begin, last - begin, f"{part}: {(last - first) / 1e6:.2f} ms")
            for part, first, last in inside
            if first < last
        ]
        return bar(pieces, end - begin, height)

    found = []
    for recording, exchanges in zip(analysis.recordings, analysis.exchanges):
        before = f"rank {recording.rank}, " if len(analysis.recordings) > 1 else ""
        for timeline in analysis.timelines:
            if timeline.rank == recording.rank:
                found.append(row(f"{before}{timeline.device}", drawn(timeline.steps[number])))
        python = [(LAUNCHING if span.what == STEP else READING, span.begin, span.end) for span in recording.spans]
        found.append(row(f"{before}Python", drawn(python, 10)))
        gradients = [one for one in exchanges if one.is_gradient]
        if gradients:
            late = [(LATE, one.ready, one.all_ready) for one in gradients]
            moving = [(TRANSFER, one.all_ready, one.end) for one in gradients]
            found.append(row(f"{before}exchange", drawn([*late, *moving], 10)))
    ticks = "".join(f"<span>{(end - begin) / 1e6 * part / 4:.1f}</span>" for part in range(4))
    found.append(f'<div class="row"><div class="axis">{ticks}<span>{(end - begin) / 1e6:.1f} ms</span></div></div>')
    return "".join(found)


def step_chart(analysis):
    """A column for each step, with the parts' mean over all devices."""
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
            title = f"step {number + 1}, {part}: {totals[part]:.2f} ms"
            rectangles.append(
                f'<rect x="{number + 0.06:.2f}" y="{top:.3f}" width="0.88" height="{totals[part]:.3f}" '
                f'fill="{COLOURS[part]}"><title>{title}</title></rect>'
            )
    drawing = _drawing(f"{len(columns)} {highest:.3f}", 180, "".join(rectangles))
    scale = f"<span>{highest:.1f} ms</span><span>{highest / 2:.1f}</span><span>0</span>"
    axis = f"<span>step 1</span><span>step {len(columns)}</span>"
    return f'<div class="chart"><div class="scale">{scale}</div>{drawing}<div class="axis">{axis}</div></div>'
