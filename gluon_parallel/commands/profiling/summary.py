"""Summary of a profile as text: a table of parts, and the findings."""

import textwrap

from .parts import PARTS


def head(analysis):
    """The first line: how many steps, how long, on what."""
    num_processes, num_devices = len(analysis.recordings), len(analysis.timelines)
    words = [
        f"{analysis.num_steps} step{'s' * (analysis.num_steps != 1)} of {analysis.seconds() * 1e3:.1f} ms",
        f"{num_devices} device{'s' * (num_devices != 1)} in {num_processes} process{'es' * (num_processes != 1)}",
    ]
    if analysis.samples_per_second:
        words.append(f"{analysis.samples_per_second:,.0f} samples/s")
    return ", ".join(words)


def rows(analysis):
    """(part, ms per step of each timeline) of the parts that take a thousandth of a step anywhere; last, of all."""
    for part in PARTS:
        values = [timeline.seconds(part) * 1e3 for timeline in analysis.timelines]
        if max(values) >= analysis.seconds():
            yield part, values
    yield "together", [timeline.seconds() * 1e3 for timeline in analysis.timelines]


def summary(analysis, findings):
    """The text that is printed of an :class:`.Analysis` and sentences about it."""
    names = [analysis.name(timeline) for timeline in analysis.timelines]
    width = max(12, *(len(name) + 2 for name in names))
    lines = [head(analysis), f"{'ms per step':28}" + "".join(f"{name:>{width}}" for name in names)]
    lines += [f"{part:28}" + "".join(f"{value:{width}.2f}" for value in values) for part, values in rows(analysis)]
    shares = ["-" if not one.exchanged else f"{one.hidden / one.exchanged:.0%}" for one in analysis.timelines]
    if any(share != "-" for share in shares):
        lines.append(f"{'exchange that is hidden':28}" + "".join(f"{share:>{width}}" for share in shares))
    for sentence in findings:
        lines += textwrap.wrap(sentence, 110, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)
