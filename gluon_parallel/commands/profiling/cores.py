"""Cores of this host: for how long this process used them, and how long they were idle."""

import math
import os
import time
from pathlib import Path

from ...cores import cpu_limit
from ...launch_engines import agent

_TICK = 1 / os.sysconf("SC_CLK_TCK")


def processor_seconds():
    """Processor time of this process and of those that it started, such as a DataLoader's workers."""
    ticks = [sum(map(int, agent.status(process)[11:15])) for process in agent.descendants(os.getpid())]
    of_ended = os.times().children_user + os.times().children_system
    return time.process_time() + of_ended + _TICK * sum(ticks)


def idle_seconds():
    """How long the cores of this process's affinity mask have been idle, added up; NaN in a container with a limit.

    There, other containers may use the cores too, and what is idle is not for this process.
    """
    cores = os.sched_getaffinity(0)
    if cpu_limit() < len(cores):
        return math.nan
    own = {f"cpu{number}" for number in cores}
    lines = [line.split() for line in Path("/proc/stat").read_text("ascii").splitlines()]
    return _TICK * sum(int(line[4]) + int(line[5]) for line in lines if line[0] in own)
