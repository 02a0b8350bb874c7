"""Report of the command `doctor`: sections with facts and findings, as text of 100 columns and as JSON."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

TIMEOUT = 55.0  # seconds for all sections
MORE_TIME = f"gluon-parallel doctor --timeout {4 * TIMEOUT:.0f}"
WIDTH = 100
VERDICTS = OK, WARNING, INCONCLUSIVE, FAILED = "ok", "warning", "inconclusive", "failed"  # from good to bad
_INDENT = 10  # columns


class Finding(NamedTuple):
    """Something that is wrong."""

    verdict: str  # WARNING, INCONCLUSIVE (its time was over before it was known) or FAILED
    text: str
    cure: str = ""  # a command, or what to do


@dataclasses.dataclass
class Section:
    """One part of the report."""

    name: str
    facts: dict[str, str] = dataclasses.field(default_factory=dict)  # by what they are about
    findings: list[Finding] = dataclasses.field(default_factory=list)
    data: Any = None  # what a probe has answered, for JSON

    def warn(self, text: str, cure: str) -> None:
        """Add the finding of something that is wrong, but does not stop training."""
        self.findings.append(Finding(WARNING, text, cure))

    def fail(self, text: str, cure: str) -> None:
        """Add the finding of something that stops training."""
        self.findings.append(Finding(FAILED, text, cure))

    @property
    def verdict(self) -> str:
        """The worst of the findings."""
        return max((finding.verdict for finding in self.findings), key=VERDICTS.index, default=OK)


def text(sections: Sequence[Section]) -> str:
    """What is wrong, the worst first, then a paragraph of what was found; no word is broken, so paths can be copied."""
    lines = []
    for section in sorted(sections, key=lambda section: VERDICTS.index(section.verdict), reverse=True):
        for finding in section.findings:
            lines.append(_wrapped(f"[{finding.verdict}]", f"{section.name}: {finding.text}"))
            lines += [_wrapped("    cure:", finding.cure)] if finding.cure else []
    facts = (f"{section.name} {label} {value}" for section in sections for label, value in section.facts.items())
    return "\n".join([*lines, *[""] * bool(lines), _wrapped("[found]", "; ".join(facts))])


def as_json(section: Section) -> dict[str, Any]:
    """The section for ``json.dumps``."""
    findings = [finding._asdict() for finding in section.findings]
    return {**vars(section), "verdict": section.verdict, "findings": findings}


def _wrapped(first: str, words: str) -> str:
    """Words behind the first one, which has a column of its own; the user's own folder is nobody's business."""
    home = os.path.expanduser("~")
    words = words if len(home) < 3 else words.replace(home, "~")
    # "[inconclusive]" is longer than its column
    first = f"{first:{_INDENT}}" if len(first) < _INDENT else f"{first}\n{'':{_INDENT}}"
    lines = textwrap.wrap(words, WIDTH - _INDENT, break_on_hyphens=False, break_long_words=False)
    return first + f"\n{'':{_INDENT}}".join(lines)
