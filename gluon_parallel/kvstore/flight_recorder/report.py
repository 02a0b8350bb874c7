"""Reports of the flight recorder, at errors and at SIGUSR1: where processes differ, and what each exchanged last."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ... import launcher
from ...environment import LAUNCH_FOLDER
from ...errors import LOG, WorkerLost
from ...forks import undo_in_forks
from ...native.records import C
from . import stack
from .ring import RECORDER, Entry, Name, read

CALL = "call"  # the kind of an entry that is no exchange, but a function that every process must call
_NO_EXCHANGES = ("rendezvous", CALL)
FOLDER = "GLUON_PARALLEL_FLIGHT_RECORDER"
WHERE = "The last exchanges of process "  # begins the sentence that names the file
_KEPT = 4  # reports in the file, with the new one
_BETWEEN = "\n\n\n"
_SHOWN = 3  # processes, and exchanges of each, that are named
_STATES = {"Z": "is gone", "X": "is gone", "T": "is stopped", "t": "is stopped"}  # as in /proc

_lock = threading.RLock()  # a handler of SIGUSR1 may run in the middle of writing


class Difference(NamedTuple):
    """What is known of another process."""

    state: str  # "is gone", "is stopped", or ""
    behind: list  # the exchanges to which this process came and the other did not
    ahead: list  # the other way round
    last: str  # what it came to last
    seconds: float  # since then


def differences(progress: Any = None) -> dict[int, Difference]:
    """{rank: :class:`Difference`} of the progress engine's other ranks; without it, of the readable ones."""
    mine, found = _exchanges(RECORDER.memory), {}
    for rank in progress.others if progress else RECORDER.others:
        if rank in RECORDER.others:
            memory = RECORDER.others[rank]
            theirs = _exchanges(memory)
            behind, ahead = _not_in(mine, theirs, rank), _not_in(theirs, mine, rank)
            last: Any = max(theirs.values(), key=lambda entry: entry.asked, default=None)
            state, asked = _state_of(memory), last.asked if last else 0
        else:  # unreadable: by its messages
            waiting = progress.active()
            behind = list(dict.fromkeys(_named(one.name) for one in waiting if rank in one.ranks_missing()))
            ahead = [_named(name) for name in progress.lost.ahead(rank)]
            last, asked = progress.lost.last.get(rank, (None, 0))
            last, state = last and _named(last), ""
        found[rank] = Difference(state, behind, ahead, str(last or ""), (time.monotonic_ns() - asked) / 1e9)
    return found


def _exchanges(memory: Any) -> dict[tuple, Entry]:
    return {entry.what: entry for entry in read(memory) if entry.kind not in _NO_EXCHANGES}


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
    """The collective functions that some processes have called and others not, in words; "" if none.

    Args:
        waited_for: ranks known to be missing in this process's function, even if their recorder is unreadable.
    """
    apart: dict[tuple, list[str]] = {}
    mine = _calls(RECORDER.memory)
    for rank in sorted({*RECORDER.others, *waited_for}):
        memory = RECORDER.others.get(rank)
        theirs = {} if memory is None else _calls(memory)
        pairs = [(RECORDER.rank, mine, rank, theirs), (rank, theirs, RECORDER.rank, mine)]
        if memory is not None and rank not in waited_for and _state_of(memory):
            # Gone or stopped says more, except for calls that it gave up because others did not come.
            given_up = {what: call for what, call in theirs.items() if call.done == C.GAVE_UP}
            pairs = [(rank, given_up, RECORDER.rank, mine)]
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
        if rank not in RECORDER.others:  # unreadable: by its messages
            at[rank] = progress.lost.stack(rank)
        elif not found[rank].state:
            head = C.RecorderMemory.from_buffer(RECORDER.others[rank])
            at[rank] = stack.of_process(head.process, head.stack)
    return ". ".join(f"Process {rank} is at {text}" for rank, text in at.items() if text)


def _state_of(memory: Any) -> str:
    """The state of the process whose recorder that is, in words; "" if it runs or has not said who it is."""
    process = C.RecorderMemory.from_buffer(memory).process
    try:
        text = Path(f"/proc/{process}/stat").read_text("utf-8", errors="replace") if process else ") R"
    except (FileNotFoundError, ProcessLookupError):
        text = ") X"
    return _STATES.get(text.rpartition(")")[2].split()[0], "")


def path() -> Path:
    """Where the file is: beside the launcher's logs, or in ``runs/flight_recorder``; or where the variable says."""
    folder = os.environ.get(FOLDER) or os.environ.get(LAUNCH_FOLDER) or os.path.join("runs", "flight_recorder")
    return Path(folder).absolute() / f"flight-recorder-rank-{RECORDER.rank}.txt"


def advice(otherwise: str, waited_for: Collection[int] = ()) -> str:
    """What to do where processes wait for each other: call the function that only some have called, or `otherwise`."""
    apart = calls_apart(waited_for)
    if not apart:
        return otherwise
    return (
        f"{apart[0].upper()}{apart[1:]}. Every process must call it, in the same order: not one alone, as behind "
        "`if rank == 0:`. For one that is slower there is a longer limit: GLUON_PARALLEL_TIMEOUT=seconds"
    )


def gave_up(problem: str, advice: str = "", kind: type[Exception] = WorkerLost) -> Exception:
    """The error of a wait that is given up: the problem, what to do, and the report that is written now."""
    said = ". ".join(filter(None, [problem, advice]))
    return kind(f"{said}. {write(f'{kind.__name__}: {problem}')}")


def write(reason: str) -> str:
    """Write a report to the file, behind the last ones; `reason`, an error or a signal, is in its first line.

    Returns what differs between the processes and where the file is, as sentences for an error.
    """
    told = ""
    try:
        found: dict[int, Any] = differences(RECORDER.progress)
        told = ". ".join(filter(None, [sentences(found, RECORDER.rank), stacks(found, RECORDER.progress)]))
        file = path()
        with _lock:
            file.parent.mkdir(parents=True, exist_ok=True)
            earlier = file.read_text("utf-8").split(_BETWEEN)[-_KEPT:-1] if file.exists() else []
            new = file.with_name(f"{file.name}.{os.getpid()}")
            new.write_text(_BETWEEN.join([*earlier, "\n".join(_lines(reason, told, found)), ""]), "utf-8")
            new.replace(file)  # a process that is killed meanwhile leaves the earlier ones
    except Exception as error:  # it must not hide the error for which this is written
        where = f"The flight recorder's file cannot be written: {type(error).__name__}: {error}"
    else:
        where = f"{WHERE}{RECORDER.rank} are in {file}"
    return f"{told}. {where}".removeprefix(". ")


def _lines(reason: str, told: str, found: Mapping[int, Difference]) -> Iterator[str]:
    """The lines of the file."""
    now, clock = time.time(), time.monotonic_ns()
    who = f"process {RECORDER.rank} of {RECORDER.size} ({os.getpid()} on {socket.gethostname()})"
    yield f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))}, {who}: {reason}"
    is_compared = RECORDER.progress or found or RECORDER.size == 1
    same = "Nothing differs." if is_compared else "Not compared: no other process can be read from here."
    yield from (told or same, f"The main thread is at {stack.of_this_process()}")
    yield from ("", f"process {RECORDER.rank}", *_table(RECORDER.memory, now, clock))
    for rank, memory in list(RECORDER.others.items()):
        if rank in found and (found[rank].state or found[rank].behind):
            yield from ("", f"process {rank}, read by process {RECORDER.rank}", *_table(memory, now, clock))


def _table(memory: Any, now: float, clock: int) -> Iterator[str]:
    """Its entries, a line for each: when it was asked for, by the clock on the wall, and how long it took."""
    entries = read(memory)
    yield f"{'asked':<15} {'took, ms':>10} {'bytes':>11} {'call':>7}  what" if entries else "nothing was recorded"
    for entry in entries:
        asked = now - (clock - entry.asked) / 1e9
        clock_time = f"{time.strftime('%H:%M:%S', time.localtime(asked))}.{int(asked % 1 * 1e6):06d}"
        took = f"{(entry.done - entry.asked) / 1e6:.3f}" if entry.done > 0 else "gave up" if entry.done else "waits"
        what = "  ".join(filter(None, [entry.kind, entry.key and f"key {entry.key}", entry.label]))
        yield f"{clock_time:<15} {took:>10} {entry.size:>11,} {entry.call:>7}  {what}"


def start(rank: int, size: int, progress: Any = None) -> None:
    """This process is `rank` of `size`: from now on SIGUSR1 writes its file, unless the program uses that itself.

    `progress` is its progress engine, if it has one.

    Python runs handlers in the main thread alone, and not before it comes back from MXNet, which may be never. What
    Python itself does when the signal comes, in C, is to write the signal's number to a pipe; a thread reads it.
    """
    RECORDER.rank, RECORDER.size = rank, size
    if progress is not None:
        RECORDER.progress = progress
    if size > 1 and not RECORDER.stack:
        RECORDER.stack = stack.listen()
    is_free = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    if size == 1 or not is_free or threading.current_thread() is not threading.main_thread():
        return
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(reading, True)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if before != -1:  # taken, as by asyncio: the handler must do
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
        signal.signal(signal.SIGUSR1, _handle)
    else:
        signal.signal(signal.SIGUSR1, _handle_elsewhere)
        threading.Thread(target=_read, args=(reading,), name="gluon_parallel.flight_recorder", daemon=True).start()
    signal.siginterrupt(signal.SIGUSR1, False)  # no system call of another library fails because of it
    undo_in_forks(lambda: _leave(writing if before == -1 else None))
    launcher.send(launcher.LISTENS)


def _handle(*_: Any) -> None:
    written = write("SIGUSR1")
    if getattr(RECORDER.progress, "failure", None) is None:  # else the error of the exchanges has said so
        LOG.warning(f"{launcher.SAID}{written}")
    LOG.warning(f"{launcher.SAID}the main thread is at {stack.of_this_process()}")
    launcher.send(launcher.WRITTEN)


def _handle_elsewhere(*_: Any) -> None:
    pass  # the thread does it


def _read(reading: int) -> None:
    with contextlib.suppress(OSError):  # the program has closed all files that it does not know
        while True:
            for number in os.read(reading, 64):
                if number == signal.SIGUSR1 and signal.getsignal(number) is _handle_elsewhere:  # still our handler
                    _handle()


def _leave(writing: int | None) -> None:
    """In a forked process, such as a DataLoader's worker: SIGUSR1, sent to all, neither ends it nor writes a file."""
    if signal.getsignal(signal.SIGUSR1) is _handle:
        signal.signal(signal.SIGUSR1, _handle_elsewhere)
    if writing is not None and (now := signal.set_wakeup_fd(-1)) != writing:
        signal.set_wakeup_fd(now)
