"""Section on training: real steps on one device and on several, and how far the weights differ."""

from __future__ import annotations

from typing import Optional

from .mxnet_build import command_in
from .probes import Probes
from .report import FAILED, INCONCLUSIVE, MORE_TIME, Finding, Section

TOLERANCE = 1e-6  # of float64
_PARITY = "gluon-parallel parity --processes 1, and report what it prints"


def check(probes: Probes) -> tuple[Section, Optional[bool]]:
    """Train small nets, without and with SyncBatchNorm; and whether that works, None if the time was too short."""
    answer = probes.ask("train_steps")
    section = Section("Training", data=answer.found)
    rest = answer.found.pop("runs", [])
    for run, (difference, seconds) in answer.found.items():
        rest.remove(run)
        equal = difference <= TOLERANCE  # also false for NaN
        word = "the weights of one device" if equal else "OTHER WEIGHTS than one device"
        section.facts[run] = f"{word} (largest difference {difference:.0e}); {1e3 * seconds:.0f} ms a step"
        if not equal:
            text = f"{run}: weights differ from those of one device by {difference:.0e}, more than {TOLERANCE:.0e}."
            section.fail(text, _PARITY)
    if answer.status is None and answer.found:
        text = (
            f"Not tried to the end, for {answer.error}: {', '.join(rest)}. Numba compiles SyncBatchNorm when it is "
            "used for the first time, for 20 s on one core."
        )
        section.findings.append(Finding(INCONCLUSIVE, text, MORE_TIME))
    elif answer.error:
        text = f"Steps of {rest[0] if rest else 'a net'} cannot be trained: {answer.error}."
        section.findings.append(answer.finding(text, command_in(answer.error) or _PARITY))
    return section, False if section.verdict == FAILED else True if answer.found else None
