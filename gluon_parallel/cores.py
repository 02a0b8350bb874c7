"""Number of CPU cores that this process may use, by its affinity mask and its control groups.

It imports no MXNet, since the doctor uses it.
"""

import math
import os
from pathlib import Path


def num_physical():
    """Number of physical cores that this process may use; two hyper-threads of one core count as one."""
    cores = len({physical_core(number) for number in os.sched_getaffinity(0)})
    return int(max(1, min(cores, cpu_limit())))


def num_logical():
    """Number of logical cores that this process may use: hyper-threads count as cores."""
    return int(max(1, min(len(os.sched_getaffinity(0)), cpu_limit())))


def cpu_limit():
    """CPU limit of the process's control groups in cores, a float; infinite without one."""
    return min(_cpu_limits(), default=math.inf)


def physical_core(number):
    """Identifier of a logical core's physical core: the list of its hyper-threads."""
    path = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:  # unknown: it counts as a core of its own
        return str(number)


def _cpu_limits(root=Path("/sys/fs/cgroup"), own=Path("/proc/self/cgroup")):
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
        top, path = root / controllers, Path(group.lstrip("/"))
        for folder in {top / path, *(top / parent for parent in path.parents), root / "cpu"}:
            quota, period = _quota(folder)
            if quota > 0 and period > 0:
                yield quota / period


def _quota(folder):
    """(quota, period) in microseconds; -1 means no limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            return (-1 if quota == "max" else int(quota)), int(period)
        files = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
        quota, period = (int(file.read_text(encoding="ascii")) for file in files)
        return quota, period
    except (OSError, ValueError):
        return -1, -1
