"""Rows of results: what every benchmark has measured, in one format, printed at once and written as JSON.

A row compares two contestants that took turns in one run. Its fields:

- ``part``: the work, such as "LeNet, 256 images per step"; ``when``: which steps of it, or "".
- ``measured``, ``against``: the two contestants; ``against`` is "" where there is nothing to compare with.
- ``unit`` of ``values`` and ``others``: what each turn of ``measured`` and of ``against`` took. Less is better, so
  ``others[i] / values[i]`` is above 1 where ``measured`` is better.
- ``processor``: milliseconds of processor time that a process of each of them took per turn, medians; or null.
- ``work``: ``{"flop": ...}`` or ``{"bytes": ...}``, the arithmetic or the least memory traffic of a turn; or null.
- ``command``: what repeats it.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from pathlib import Path

import rounds

LARGER = {"us": "ms", "ms": "s"}  # unit -> the next one
UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "MB": 1e-6}  # of seconds, or of bytes
ROOT = Path(__file__).resolve().parents[2]
NOT_HERE = 77  # the exit code of a benchmark that this machine cannot run


def add_options(parser, has_late_steps=False):
    """Add the options that all benchmarks have, and one of those that measure early and late steps."""
    parser.add_argument("--json", metavar="FILE", help="write the rows of results to this file")
    if has_late_steps:
        parser.add_argument("--quick", action="store_true", help="measure the early steps alone")


def parse(parser, worker):
    """The options, with those of all benchmarks; a process with ``--worker`` is one of a group: it works, and ends."""
    add_options(parser, has_late_steps=True)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        sys.exit()
    return options


def ratios(row):
    """How many times what `measured` takes `against` took, in each turn."""
    return [other / value for value, other in zip(row["values"], row["others"])]


def middle(values):
    """(median, lower quartile, upper quartile); of fewer than four values the least and the most."""
    if len(values) < 4:
        return statistics.median(values), min(values), max(values)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, low, high


def command_line(program="python"):
    """The command that repeats this run, without the file of the rows and without paths of this machine."""
    words, skip = [], False
    for word in sys.argv[1:]:
        if not skip and not word.startswith("--json"):
            words.append(f"/path/to/{Path(word).name}" if word.startswith("/") else word)
        skip = word == "--json"
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    return f"{program} {shlex.join([str(shown), *words])}"


class Rows(list):
    """The rows of one run.

    Args:
        options: with the attribute `json`: the file, or None.
        program: what runs the script, with its options.
    """

    def __init__(self, options, program="python"):
        super().__init__()
        self._file, self._command = options.json, command_line(program)

    def add(self, part, taken, measured, others=None, *, names=None, when="", unit="ms", work=None):
        """Add a row for each of `others`, print it, and write the file anew.

        Args:
            part, measured, when, unit, work: fields of the row.
            taken: contestant -> its turns, each a number (seconds or bytes) or a :class:`rounds.Turn`.
            others: contestants to compare with; all but `measured` if None.
            names: contestant -> how the rows call it, where this differs.
        """
        if others is None:
            others = [name for name in taken if name != measured]
        called = names or {}
        print(f"{part} ({rounds.load()})", flush=True)
        for other in others or [""]:
            turns = {name: taken.get(name, []) for name in (measured, other)}
            values, against = (
                [_short(_seconds(turn) * UNITS[unit]) for turn in turns[name]] for name in (measured, other)
            )
            used = [
                _short(statistics.median(1e3 * turn.processor / turn.processes for turn in turns[name]))
                for name in turns
                if turns[name] and hasattr(turns[name][0], "processor")
            ]
            row = {
                "part": part, "when": when, "measured": called.get(measured, measured),
                "against": called.get(other, other), "unit": unit, "values": values, "others": against,
                "processor": used or None, "work": work, "command": self._command,
            }  # fmt: skip
            self.append(row)
            print(f"    {words(row)}", flush=True)
        if self._file:
            Path(self._file).write_text(json.dumps(self, indent=1) + "\n", encoding="utf-8")


def _seconds(turn):
    return getattr(turn, "seconds", turn)


def _short(value):
    """Six digits, for the file."""
    return float(f"{value:.6g}")


def number(value):
    """At least three digits."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def quantity(values, unit):
    """Numbers with one unit, a larger one where all are 1,000 or more: "10 / 12 ms"."""
    while min(values) >= 1000 and unit in LARGER:
        values, unit = [value / 1000 for value in values], LARGER[unit]
    return f"{' / '.join(map(number, values))} {unit}"


def words(row):
    """A row as a line."""
    text = f"{row['measured']}: {quantity([statistics.median(row['values'])], row['unit'])}"
    if row["against"]:
        median, low, high = middle(ratios(row))
        text += f"; {row['against']}: {quantity([statistics.median(row['others'])], row['unit'])}"
        text += f"; ratio {median:.2f} ({low:.2f} to {high:.2f})"
    if row["processor"]:
        text += f"; processor time per process {', '.join(map(number, row['processor']))} ms"
    return f"{row['when']}{'  ' * bool(row['when'])}{text}"
