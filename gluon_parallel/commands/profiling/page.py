"""Page of a profile: one HTML file with plots, which needs no network; its text is in page.html."""

import re
import statistics
from pathlib import Path

from .parts import COLOURS, COMPUTING, DEVICES, LATE, MEANING
from .plots import mean_step_bars, median_step_rows, step_chart
from .summary import head, rows

_NUM_OPERATORS, _NUM_LAYERS = 12, 10
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
        used={part: MEANING[part] for part, _ in rows(analysis)},
        bars=mean_step_bars(analysis), parts=_parts(analysis), step=median_step_rows(analysis),
        steps=step_chart(analysis), operators=_operators(analysis), layers=_layers(analysis),
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
    lines = [*rows(analysis), ("together", [timeline.seconds() * 1e3 for timeline in analysis.timelines])]
    titles = ["ms per step", *map(analysis.name, analysis.timelines)]
    return titles, [([part, *(f"{value:.2f}" for value in values)], None) for part, values in lines]


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
