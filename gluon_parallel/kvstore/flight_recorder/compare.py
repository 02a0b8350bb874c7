"""Where processes differ: who is behind whom, and what each came to last."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ...native.records import C
from . import stack
from .ring import RECORDER, Entry, Name, read

CALL = "call"  # the kind of an entry that is no exchange, but a function that every process must call
_NO_EXCHANGES = ("rendezvous", CALL)
_SHOWN = 3  # processes, and exchanges of each, that are named
_STATES = {"": "is gone", "Z": "is gone", "X": "is gone", "T": "is stopped", "t": "is stopped"}  # as in /proc


class Difference(NamedTuple):
    """What is known of another process."""

    state: str  # "is gone", "is stopped", or ""
    behind: list  # the exchanges to which this process came and the other did not
    ahead: list  # the other way round
    last: str  # what it came to last
    seconds: float  # since then


def differences(progress: Any = None) -> dict[int, Difference]:
    """{rank: :class:`Difference`} of the other processes: of a progress engine, or else those that can be read."""
    mine = {entry.what: entry for entry in read(RECORDER.memory) if entry.kind not in _NO_EXCHANGES}
    found = {}
    for rank in progress.others if progress else RECORDER.others:
        if rank in RECORDER.others:
            memory = RECORDER.others[rank]
            theirs = {entry.what: entry for entry in read(memory) if entry.kind not in _NO_EXCHANGES}
            behind, ahead = _not_in(mine, theirs, rank), _not_in(theirs, mine, rank)
            last: Any = max(theirs.values(), key=lambda entry: entry.asked, default=None)
            state = _state_of(memory)
            asked = last.asked if last else 0
        else:  # what it has sent
            waiting = progress.active()
            behind = list(dict.fromkeys(_named(one.name) for one in waiting if rank in one.ranks_missing()))
            ahead = [_named(name) for name in progress.lost.ahead(rank)]
            last, asked = progress.lost.last.get(rank, (None, 0))
            last, state = last and _named(last), ""
        found[rank] = Difference(state, behind, ahead, str(last or ""), (time.monotonic_ns() - asked) / 1e9)
    return found


def _not_in(some: dict[tuple, Entry], others: dict[tuple, Entry], rank: int) -> list[str]:
    """The exchanges with process `rank` among `some` that have not ended, and are not among `others`."""
    waiting = [entry for what, entry in some.items() if not entry.done and what not in others]
    return [str(entry) for entry in waiting if RECORDER.concerns(entry, rank)]


def sentences(found: Mapping[int, Difference], rank: int) -> str:
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


def calls_apart(waited_for: Collection[int] = ()) -> str:
    """Which functions that every process must call some have called and others have not, in words; "" if none.

    Args:
        waited_for: ranks that have not come to the function that this process is in, where nobody can read theirs.
    """
    apart: dict[tuple, list[str]] = {}
    mine = _calls(RECORDER.memory)
    for rank in sorted({*RECORDER.others, *waited_for}):
        memory = RECORDER.others.get(rank)
        theirs = {} if memory is None else _calls(memory)
        pairs = [(RECORDER.rank, mine, rank, theirs), (rank, theirs, RECORDER.rank, mine)]
        if memory is not None and rank not in waited_for and _state_of(memory):
            # It is gone or stopped, which says more, unless it is because the others did not come.
            pairs = [
                (rank, {what: call for what, call in theirs.items() if call.done == C.GAVE_UP}, RECORDER.rank, mine)
            ]
        for who, calls, other, others in pairs:
            for what, entry in calls.items():
                if entry.done <= 0 and what not in others:
                    apart.setdefault((who, entry.label), []).append(str(other))
    return "; ".join(
        f"process {who} has called {name}, and "
        + (f"process {others[0]} has not" if len(others) == 1 else f"processes {', '.join(others)} have not")
        for (who, name), others in apart.items()
    )


def _calls(memory: Any) -> dict[tuple, Entry]:
    return {entry.what: entry for entry in read(memory) if entry.kind == CALL}


def _some(texts: Sequence[str]) -> str:
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _named(name: Name) -> str:
    kind, key, label = RECORDER.kind_key_label(name)
    return f"{kind} of {label or f'key {key}'}"


def stacks(found: Mapping[int, Difference], progress: Any = None) -> str:
    """Where the main threads of the processes are that differ, as :func:`sentences` names them; "" if none answers."""
    named = [rank for rank, one in found.items() if one.state or one.behind or one.ahead][:_SHOWN]
    at = {}
    for rank in named:
        if rank not in RECORDER.others:  # what it has sent
            at[rank] = progress.lost.stack(rank)
        elif not found[rank].state:
            head = C.RecorderMemory.from_buffer(RECORDER.others[rank])
            at[rank] = stack.of_process(head.process, head.stack)
    return ". ".join(f"Process {rank} is at {text}" for rank, text in at.items() if text)


def _state_of(memory: Any) -> str:
    """The state of the process whose recorder that is, in words; "" if it runs or has not said who it is."""
    process = C.RecorderMemory.from_buffer(memory).process
    return _STATES.get(_state(process), "") if process else ""


def _state(process: int) -> str:
    """The state of a process of this host, as ``ps`` shows it; "" if it is gone."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
