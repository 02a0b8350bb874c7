"""Where processes differ: who is behind whom, and what each came to last."""

from __future__ import annotations

import time
from typing import NamedTuple

from . import layout
from .ring import RECORDER, read

_SHOWN = 3  # processes, and exchanges of each, that are named
_STATES = {"": "is gone", "Z": "is gone", "X": "is gone", "T": "is stopped", "t": "is stopped"}  # as in /proc


class Difference(NamedTuple):
    """What is known of another process."""

    state: str  # "is gone", "is stopped", or ""
    behind: list  # the exchanges to which this process came and the other did not
    ahead: list  # the other way round
    last: str  # what it came to last
    seconds: float  # since then


def differences(progress=None):
    """{rank: :class:`Difference`} of the other processes: of a progress engine, or else those that can be read."""
    mine = {entry.what: entry for entry in read(RECORDER.memory) if entry.kind != "rendezvous"}
    found = {}
    for rank in progress.others if progress else RECORDER.others:
        if rank in RECORDER.others:
            memory = RECORDER.others[rank]
            theirs = {entry.what: entry for entry in read(memory) if entry.kind != "rendezvous"}
            behind = [str(entry) for what, entry in mine.items() if not entry.done and what not in theirs]
            ahead = [str(entry) for what, entry in theirs.items() if not entry.done and what not in mine]
            last = max(theirs.values(), key=lambda entry: entry.asked, default=None)
            process = int(memory[layout.PROCESS])
            state = _STATES.get(_state(process), "") if process else ""  # 0: it has not come so far as to say it
            asked = last.asked if last else 0
        else:  # what it has sent
            waiting = progress.pending.active()
            behind = [_named(exchange.name) for exchange in waiting if rank in exchange.ranks_missing()]
            ahead = [_named(name) for name in progress.pending.early_from(rank)]
            last, asked = progress.lost.last.get(rank, (None, 0))
            last, state = last and _named(last), ""
        found[rank] = Difference(state, behind, ahead, str(last or ""), (time.monotonic_ns() - asked) / 1e9)
    return found


def sentences(found, rank):
    """What differs from this process, in words; "" if nothing does.

    Example:
        >>> print(sentences({1: Difference("is gone", ["sum of w (call 3)"], [], "sum of w (call 2)", 1.5)}, 0))
        Process 1 is gone, 1 exchange behind process 0 (sum of w (call 3)); it last came to sum of w (call 2), 1.5 s ago
    """
    said: list[str] = []
    num_more = 0
    for other, (state, behind, ahead, last, seconds) in found.items():
        if not state and not behind and not ahead:
            continue
        if len(said) == _SHOWN:
            num_more += 1
            continue
        parts = [f"Process {other} {state}".rstrip()]
        if behind:
            num = f"{len(behind)} exchange{'s' if len(behind) > 1 else ''}"
            parts.append(f"{',' if state else ' is'} {num} behind process {rank} ({_some(behind)})")
        if ahead:
            joined = " and" if state or behind else ""
            parts.append(f"{joined} waits at {_some(ahead)}, to which process {rank} has not come")
        ago = f"{seconds:.3g}" if seconds < 100 else f"{seconds:.0f}"
        parts.append(f"; it last came to {last}, {ago} s ago" if last else "; nothing has come from it")
        said.append("".join(parts))
    return ". ".join(said) + (f". {num_more} more differ" if num_more else "")


def _some(texts):
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _named(name):
    kind, key, label = RECORDER.kind_key_label(name)
    return f"{kind} of {label or f'key {key}'}"


def _state(process):
    """The state of a process of this host, as ``ps`` shows it; "" if it is gone."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
