"""Processor time of this process and of those that it has started: tells one that computes from one that hangs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

_BUSY = 0.05  # of a core's time: a process that takes more computes; one that hangs takes a tenth, to answer others
_TICK = os.sysconf("SC_CLK_TCK")
_PARENT, _TIMES = 1, slice(11, 15)  # fields of /proc/N/stat behind the name; times: its own, and of ended children


class ProcessorTime(NamedTuple):
    """Processor time that a process and those that it has started had taken at a time of its clock, both in seconds."""

    clock: float
    seconds: float

    def is_busy_since(self, before: ProcessorTime) -> bool:
        """Whether they have computed since `before`.

        Example:
            >>> before = ProcessorTime(10.0, 4.0)
            >>> ProcessorTime(20.0, 9.0).is_busy_since(before), ProcessorTime(20.0, 4.1).is_busy_since(before)
            (True, False)
        """
        return self.seconds - before.seconds > _BUSY * (self.clock - before.clock)


def time_so_far() -> ProcessorTime:
    """The processor time of this process up to now, with that of the processes that it has started."""
    below, more, found = 0.0, {os.getpid()}, dict(_processes())
    while more:
        below += sum(found[number][1] for number in more)
        more = {number for number, (parent, _) in found.items() if parent in more}
    return ProcessorTime(time.monotonic(), below)


def _processes() -> Iterator[tuple[int, tuple[int, float]]]:
    """(number, (parent, seconds of processor time)) of this machine's processes."""
    yield os.getpid(), (0, 0.0)  # replaced below, unless its file cannot be read
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
            yield int(name), (int(fields[_PARENT]), sum(map(int, fields[_TIMES])) / _TICK)
