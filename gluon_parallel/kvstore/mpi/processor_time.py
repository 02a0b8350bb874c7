"""Processor time of this process and of those that it has started: tells one that computes from one that hangs."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from ... import native

_BUSY = 0.05  # of a core's time: a process that takes more computes; one that hangs takes a tenth, to answer others
_TICK = os.sysconf("SC_CLK_TCK")


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
    return ProcessorTime(time.monotonic(), native.function("gp_processor_time", 0)() / _TICK)
