"""Report of the command `doctor`: sections with facts, findings and a verdict, as text of 100 columns and as JSON."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from typing import Any, NamedTuple

TIMEOUT = 55.0  # seconds for all sections; the limits of each are meant for so many
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
    data: Any = None  # numbers behind the facts, for JSON

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
        return max((finding.verdict for finding in self.findings), key=VERDICTS.index, default=OK)


def text(section: Section) -> str:
    """The section in lines of at most 100 columns, but for words that are longer.

    Example:
        >>> print(text(Section("MPI", {"version": "5.0"}, [Finding("failed", "mpirun is missing.", "pip install x")])))
        [failed]  MPI: version 5.0
                ! mpirun is missing.
          cure: pip install x
    """
    facts = "; ".join(f"{label} {value}" for label, value in section.facts.items())
    lines = [_wrapped(f"[{section.verdict}]", f"{section.name}: {facts}" if facts else section.name)]
    for finding in section.findings:
        lines += [_wrapped("        !", finding.text)]
        lines += [_wrapped("    cure:", finding.cure)] if finding.cure else []
    return "\n".join(lines)


def as_json(section: Section) -> dict[str, Any]:
    """The section for ``json.dumps``."""
    findings = [finding._asdict() for finding in section.findings]
    return {**vars(section), "verdict": section.verdict, "findings": findings}


def _wrapped(first: str, words: str) -> str:
    """Words behind the first one, which has a column of its own; not broken, so that paths can be copied."""
    lines = textwrap.wrap(_short(words), WIDTH - _INDENT, break_on_hyphens=False, break_long_words=False)
    return "\n".join(f"{word:{_INDENT}}{line}" for word, line in zip([first, *[""] * len(lines)], lines))


def _short(words: str) -> str:
    """Without the name of the user's own folder, which is nobody's business in a bug report."""
    home = os.path.expanduser("~")
    return words if len(home) < 3 else words.replace(home, "~")
