"""Section on training: real steps on one device and on several, and how far the weights differ."""

from __future__ import annotations

from .probes import Probes
from .report import FAILED, WARNING, Finding, Section

TOLERANCE = 1e-6  # of float64


def check(probes: Probes) -> tuple[Section, bool]:
    """Train a small net of convolutions, without and with SyncBatchNorm; whether the first one works."""
    answer = probes.ask("train_steps")
    facts, findings, works = {}, [], False
    for run, (difference, seconds) in answer.found.items():
        equal = difference <= TOLERANCE  # also false for NaN
        works = works or equal
        facts[run] = (
            f"{'equal' if equal else 'DIFFERENT'}: {difference:.0e} from one device; {1e3 * seconds:.0f} ms a step"
        )
        if not equal:
            text = f"{run}: weights differ from those of one device by {difference:.0e}, more than {TOLERANCE:.0e}."
            findings.append(Finding(FAILED, text, "gluon-parallel parity --processes 1, and report what it prints"))
    if any(finding.verdict == FAILED for finding in findings):
        works = False
    if not answer.found:
        findings.append(Finding(FAILED, f"No step could be trained: {answer.error}."))
    elif answer.error:
        text = f"SyncBatchNorm was not tried to its end: {answer.error}. Where Numba compiles for the first time, that "
        findings.append(Finding(WARNING, f"{text}is 20 s of one core.", "gluon-parallel parity --processes 1"))
    return Section("Training", facts, findings, answer.found), works
