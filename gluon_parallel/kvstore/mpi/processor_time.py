"""Processor time of this process and of all that it has started: tells one that works between steps from a hung one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

_BUSY = 0.05  # part of one core from which on a process works; one that hangs answers others, in a tenth of that
_TICK = os.sysconf("SC_CLK_TCK")
_PARENT, _TIMES = 1, slice(11, 15)  # fields of /proc/N/stat behind the name; times: its own, and of ended children


class Work(NamedTuple):
    """What a process and those below it had worked at a moment of its clock, both in seconds."""

    clock: float
    seconds: float

    def is_busy_since(self, before: Work) -> bool:
        """Whether it has worked from `before` until this.

        Example:
            >>> Work(20.0, 9.0).is_busy_since(Work(10.0, 4.0)), Work(20.0, 4.1).is_busy_since(Work(10.0, 4.0))
            (True, False)
        """
        return self.seconds - before.seconds > _BUSY * (self.clock - before.clock)


def work_so_far() -> Work:
    """The work of this process up to now, with that of processes which it has started."""
    below, more, found = 0.0, {os.getpid()}, dict(_processes())
    while more:
        below += sum(found[number][1] for number in more)
        more = {number for number, (parent, _) in found.items() if parent in more}
    return Work(time.monotonic(), below)


def _processes() -> Iterator[tuple[int, tuple[int, float]]]:
    """(number, (parent, seconds of processor time)) of this machine's processes."""
    yield os.getpid(), (0, 0.0)  # where there is no /proc
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
            yield int(name), (int(fields[_PARENT]), sum(map(int, fields[_TIMES])) / _TICK)
