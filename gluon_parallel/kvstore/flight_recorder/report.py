"""The flight recorder's file: what this process exchanged last, and what those did that cannot say so themselves."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import stack
from .compare import Difference, calls_apart, differences, sentences, stacks
from .ring import RECORDER, read

FOLDER, _LAUNCHED = "GLUON_PARALLEL_FLIGHT_RECORDER", "GLUON_PARALLEL_LAUNCH_FOLDER"
WHERE = "The last exchanges of process "  # begins the sentence that names the file
_KEPT = 4  # reports of a file: what is older is removed
_BETWEEN = "\n\n\n"
_NOT_COMPARED = "Not compared: no other process can be read from here."
_HEADINGS = f"{'asked':<15} {'took, ms':>10} {'bytes':>11} {'call':>7}  what"

_lock = threading.RLock()  # a handler of SIGUSR1 may run in the middle of writing


def path() -> Path:
    """Where the file is: beside the launcher's logs, or in ``runs/flight_recorder``; or where the variable says."""
    folder = os.environ.get(FOLDER) or os.environ.get(_LAUNCHED) or os.path.join("runs", "flight_recorder")
    return Path(folder).absolute() / f"flight-recorder-rank-{RECORDER.rank}.txt"


def advice(otherwise: str, waited_for: Collection[int] = ()) -> str:
    """What to do where processes wait for each other: call the function that only some have called, or `otherwise`.

    Args:
        otherwise: sentences for where every process has called the same functions.
        waited_for: as of :func:`calls_apart`.
    """
    apart = calls_apart(waited_for)
    if not apart:
        return otherwise
    return (
        f"{apart[0].upper()}{apart[1:]}. Every process must call it, in the same order: not one alone, as behind "
        "`if rank == 0:`. For one that is slower there is a longer limit: GLUON_PARALLEL_TIMEOUT=seconds"
    )


def write(reason: str) -> str:
    """Write a report to the file, behind the last ones that are there from earlier.

    Args:
        reason: why, for its first line: an error or a signal.

    Returns:
        What differs between the processes and where the file is, as sentences for an error.
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
    same = "Nothing differs." if RECORDER.progress or found or RECORDER.size == 1 else _NOT_COMPARED
    yield from (told or same, f"The main thread is at {stack.of_this_process()}")
    yield from ("", f"process {RECORDER.rank}", *_table(RECORDER.memory, now, clock))
    for rank, memory in list(RECORDER.others.items()):
        if rank in found and (found[rank].state or found[rank].behind):
            yield from ("", f"process {rank}, read by process {RECORDER.rank}", *_table(memory, now, clock))


def _table(memory: Any, now: float, clock: int) -> Iterator[str]:
    """Its entries, a line for each: when it was asked for, by the clock on the wall, and how long it took."""
    entries = read(memory)
    yield _HEADINGS if entries else "nothing was recorded"
    for entry in entries:
        asked = now - (clock - entry.asked) / 1e9
        clock_time = f"{time.strftime('%H:%M:%S', time.localtime(asked))}.{int(asked % 1 * 1e6):06d}"
        took = f"{(entry.done - entry.asked) / 1e6:.3f}" if entry.done > 0 else "gave up" if entry.done else "waits"
        what = "  ".join(filter(None, [entry.kind, entry.key and f"key {entry.key}", entry.label]))
        yield f"{clock_time:<15} {took:>10} {entry.size:>11,} {entry.call:>7}  {what}"
