"""Report of the command `doctor`: sections with facts, findings and a verdict, as text of 100 columns and as JSON."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from typing import Any, NamedTuple, Union

TIMEOUT = 55.0  # seconds for all sections; the limits of each are meant for so many
MORE_TIME = f"gluon-parallel doctor --timeout {4 * TIMEOUT:.0f}"
WIDTH = 100
OK, WARNING, INCONCLUSIVE, FAILED = "ok", "warning", "inconclusive", "failed"  # from good to bad
_LABEL = 24  # columns
VALUE_WIDTH = WIDTH - 4 - _LABEL


class Finding(NamedTuple):
    """Something that is wrong."""

    verdict: str  # WARNING, INCONCLUSIVE (its time was over before it was known) or FAILED
    text: str
    cure: str = ""  # a command, or what to do


@dataclasses.dataclass
class Section:
    """One part of the report."""

    name: str
    # label -> a text, which is wrapped, or lines, which are not
    facts: dict[str, Union[str, list[str]]] = dataclasses.field(default_factory=dict)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    data: Any = None  # numbers behind the facts, for JSON
    seconds: float = 0.0

    def warn(self, text: str, cure: str) -> None:
        """Add the finding of something that is wrong, but does not stop training."""
        self.findings.append(Finding(WARNING, text, cure))

    def fail(self, text: str, cure: str) -> None:
        """Add the finding of something that stops training."""
        self.findings.append(Finding(FAILED, text, cure))

    @property
    def verdict(self) -> str:
        """The worst of the findings.

        Example:
            >>> Section("MPI").verdict, Section("MPI", {}, [Finding("warning", "slow")]).verdict
            ('ok', 'warning')
        """
        verdicts = {finding.verdict for finding in self.findings}
        return next((verdict for verdict in (FAILED, INCONCLUSIVE, WARNING) if verdict in verdicts), OK)


def text(section: Section) -> str:
    """The section in lines of at most 100 columns, but for words that are longer.

    Example:
        >>> print(text(Section("MPI", {"version": "5.0"}, [Finding("failed", "mpirun is missing.", "pip install x")])))
        [failed]  MPI
            version                 5.0
          ! mpirun is missing.
            cure: pip install x
    """
    lines = [f"{f'[{section.verdict}]':9} {section.name}"]
    for label, value in section.facts.items():
        shown = list(map(_short, value)) if isinstance(value, list) else _wrapped(_short(value), VALUE_WIDTH)
        lines += [f"    {word:{_LABEL - 1}} {line}".rstrip() for word, line in zip([label, *[""] * len(shown)], shown)]
    for finding in section.findings:
        lines += [f"  {mark} {line}" for mark, line in zip("!" + " " * 99, _wrapped(_short(finding.text), WIDTH - 4))]
        if finding.cure:
            first, *rest = _wrapped(_short(finding.cure), WIDTH - 10)
            lines += [f"    cure: {first}", *(f"          {line}" for line in rest)]
    return "\n".join(lines)


def as_json(section: Section) -> dict[str, Any]:
    """The section for ``json.dumps``."""
    findings = [finding._asdict() for finding in section.findings]
    return {**vars(section), "verdict": section.verdict, "findings": findings, "seconds": round(section.seconds, 2)}


def _wrapped(words: str, width: int) -> list[str]:
    def wrap(line: str) -> list[str]:
        return textwrap.wrap(line, width, break_on_hyphens=False, break_long_words=False)  # so that paths can be copied

    return [line for part in words.splitlines() for line in wrap(part)] or [""]


def _short(words: str) -> str:
    """Without the name of the user's own folder, which is nobody's business in a bug report."""
    home = os.path.expanduser("~")
    return words if len(home) < 3 else words.replace(home, "~")
