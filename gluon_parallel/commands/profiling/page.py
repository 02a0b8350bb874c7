"""Page of a profile: one HTML file with plots, which needs no network."""

import re
import statistics
from html import escape

from .parts import COMPUTING, DEVICES, LATE, MEANING, PARTS
from .plots import bar, legend, one_step, row, step_chart
from .style import COLOURS, CSS
from .summary import head, rows

_NUM_OPERATORS, _NUM_LAYERS = 12, 10


def write_page(path, analysis, findings):
    """Write the page.

    Args:
        path: of the file.
        analysis: an :class:`.Analysis`.
        findings: list of sentences.
    """
    path.write_text(page(analysis, findings), "utf-8")


def page(analysis, findings):
    """The page as text."""
    used = [part for part, _ in rows(analysis)]
    sentences = "".join(f"<li>{_code(one)}</li>" for one in findings)
    sections = [
        _section("Findings", "What costs most stands first.", f'<ul class="findings">{sentences}</ul>'),
        _section(
            "Where a step's time goes",
            "Every moment of a device belongs to one part. What happens behind computing is hidden, and costs nothing.",
            legend(used) + _bars(analysis) + _table(analysis),
        ),
        _section(
            "One step", "The step of median duration, all devices on one clock.", legend(used) + one_step(analysis)
        ),
        _section("All steps", "Mean of all devices.", step_chart(analysis)),
        _section("Operators", "The longest ones, per step, mean of all devices.", _operators(analysis)),
    ]
    if analysis.layers:
        text = "How long a device waits in a layer per step, forward and backward, mean of all devices."
        sections.append(_section("SyncBatchNorm layers", text, _layers(analysis)))
    words = "".join(f"<tr><td>{part}</td><td class='text'>{MEANING[part]}</td></tr>" for part in used)
    sections.append(_section("Words", "", f'<div class="words"><table>{words}</table></div>'))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Profile of a training step</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><style>{CSS}</style></head>\n<body><main>'
        f'<h1>Where a training step\'s time goes</h1><p class="soft">{escape(head(analysis))}</p>\n'
        f"{_cards(analysis)}\n" + "\n".join(sections) + "\n</main></body></html>\n"
    )


def _section(title, text, content):
    return f'<section><h2>{title}</h2><p class="soft">{text}</p>{content}</section>'


def _code(sentence):
    """A sentence in HTML, with what is to be typed as code."""
    typed = r"((?:gp\.|set_)[\w.]+(?:\([^()]*\))?|--devices [\w:]+|\w+\([\w.=]+\)|[A-Z]+_[A-Z_]+|\w+=(?:True|\.\.\.))"
    return re.sub(typed, r"<code>\1</code>", escape(sentence, quote=False))


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
    return '<div class="cards">' + "".join(f"<div><b>{value}</b>{name}</div>" for name, value in cards) + "</div>"


def _bars(analysis):
    longest = max(timeline.seconds() for timeline in analysis.timelines)
    found = []
    for timeline in analysis.timelines:
        begin, pieces = 0.0, []
        for part in PARTS:
            seconds = timeline.seconds(part)
            pieces.append((part, begin, begin + seconds, f"{part}: {seconds * 1e3:.2f} ms"))
            begin += seconds
        found.append(row(analysis.name(timeline), bar(pieces, longest), f"{timeline.seconds() * 1e3:.1f} ms"))
    return "".join(found)


def _table(analysis):
    names = "".join(f"<th>{escape(analysis.name(timeline))}</th>" for timeline in analysis.timelines)
    lines = [*rows(analysis), ("together", [timeline.seconds() * 1e3 for timeline in analysis.timelines])]
    body = "".join(
        f"<tr><td>{part}</td>" + "".join(f"<td>{value:.2f}</td>" for value in values) + "</tr>"
        for part, values in lines
    )
    return _wide(f"<th>ms per step</th>{names}", body)


def _operators(analysis):
    found = list(analysis.operators().items())[:_NUM_OPERATORS]
    lines = [
        (name.replace("_backward_", ""), part, _ms(seconds), seconds, COLOURS[part]) for (part, name), seconds in found
    ]
    return _ranking(("operator", "pass", "per step"), lines)


def _layers(analysis):
    found = analysis.layers[:_NUM_LAYERS]
    if len(analysis.recordings) == 1:
        lines = [(one.name, _ms(one.devices), one.devices, COLOURS[DEVICES]) for one in found]
        return _ranking(("layer", "for devices"), lines)
    both = [
        (one.name, _ms(one.devices), _ms(one.processes), one.devices + one.processes, COLOURS[LATE]) for one in found
    ]
    return _ranking(("layer", "for devices", "for processes"), both)


def _ms(seconds):
    return f"{seconds * 1e3:.2f} ms"


def _ranking(titles, lines):
    """A table of words, whose last column is a bar: each line ends with its length and colour."""
    longest = max((seconds for *_, seconds, _ in lines), default=0) or 1
    body = "".join(
        "<tr>"
        + "".join(f"<td>{escape(word)}</td>" for word in words)
        + f'<td class="bar"><span style="width:{seconds / longest:.1%};background:{colour}"></span></td></tr>'
        for *words, seconds, colour in lines
    )
    names = "".join(f"<th>{title}</th>" for title in titles)
    return _wide(f'{names}<th class="bar"></th>', body)


def _wide(titles, body):
    """A table that scrolls where the page is narrow."""
    return f'<div class="wide"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'
