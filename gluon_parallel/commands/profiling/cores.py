"""Cores of this host: how many this process may use, for how long it used them, and how long they were idle."""

import math
import os
import time
from pathlib import Path

from ...devices.cores import container_limit

_TICK = 1 / os.sysconf("SC_CLK_TCK")


def number():
    """How many cores this process may use, by its affinity mask and its container's limit."""
    return int(max(1, min(len(os.sched_getaffinity(0)), container_limit())))


def processor_seconds():
    """Processor time of this process and of those that it started, such as a DataLoader's workers."""
    parents, ticks = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = file.read_text("utf-8", "replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        process = int(file.parent.name)
        parents[process], ticks[process] = int(words[1]), sum(map(int, words[11:15]))  # its ended children's too

    def is_below(process):
        while process in parents:
            process = parents[process]
            if process == os.getpid():
                return True
        return False

    of_ended = os.times().children_user + os.times().children_system
    return time.process_time() + of_ended + _TICK * sum(ticks[process] for process in parents if is_below(process))


def idle_seconds():
    """How long the cores of this process's affinity mask have been idle, added up; NaN in a container with a limit.

    There, other containers may use the cores too, and what is idle is not for this process.
    """
    cores = os.sched_getaffinity(0)
    if container_limit() < len(cores):
        return math.nan
    own = {f"cpu{number}" for number in cores}
    lines = [line.split() for line in Path("/proc/stat").read_text("ascii").splitlines()]
    return _TICK * sum(int(line[4]) + int(line[5]) for line in lines if line[0] in own)
