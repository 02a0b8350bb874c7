"""Cores that this process may use, by its affinity mask and its container's limit; imports no MXNet, for the doctor."""

import math
import os
from pathlib import Path


def num_physical():
    """Physical cores that this process may use; two hyper-threads of one core count as one.

    Example:
        >>> 1 <= num_physical() <= len(os.sched_getaffinity(0))
        True
    """
    cores = len({core_of(number) for number in os.sched_getaffinity(0)})
    return int(max(1, min(cores, container_limit())))


def num_logical():
    """Logical cores that this process may use: hyper-threads count as cores."""
    return int(max(1, min(len(os.sched_getaffinity(0)), container_limit())))


def container_limit():
    """How many cores, possibly a fraction, the container may use; infinite without a limit."""
    return min(_container_limits(), default=math.inf)


def core_of(number):
    """What names the physical core of a logical one: the list of its hyper-threads."""
    path = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:  # not told here: it counts as a core of its own
        return str(number)


def _container_limits(root=Path("/sys/fs/cgroup"), own=Path("/proc/self/cgroup")):
    """The limits in cores, possibly fractions, of the control groups that this process is in (versions 1 and 2)."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # A container sees its own group as the root, or under the path that the host knows it by.
        for folder in {root / controllers / group.lstrip("/"), root / controllers, root / "cpu"}:
            quota, period = _quota(folder)
            if quota > 0 and period > 0:
                yield quota / period


def _quota(folder):
    """(quota, period) in microseconds; a quota of -1 is none."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            return (-1 if quota == "max" else int(quota)), int(period)
        files = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
        quota, period = (int(file.read_text(encoding="ascii")) for file in files)
        return quota, period
    except (OSError, ValueError):
        return -1, -1
