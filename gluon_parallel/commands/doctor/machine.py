"""Sections on the machine: cores, memory, folders that are needed, and environment variables."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ... import cores
from .probes import Probes
from .report import FAILED, WARNING, Finding, Section

GB, MB = 1 << 30, 1 << 20
_SMALL_MEMORY = GB  # ResNet-20 with SyncBatchNorm on two devices takes so much
_SMALL_FOLDER = 256 * MB
_LAUNCHERS = re.compile(r"DMLC_(ROLE|NUM_(WORKER|SERVER)|PS_ROOT_(URI|PORT)|(WORKER|SERVER|TASK)_ID|NODE_HOST)$")


def read(path: str) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def check_processor(probes: Probes) -> Section:
    """The cores that this process may use, and the threads that OpenMP is told to use."""
    usable, limit = cores.num_physical(), cores.cpu_limit()
    facts = {
        "cores": f"{usable} physical, {os.cpu_count() or 1} logical, of which affinity allows "
        f"{len(os.sched_getaffinity(0))}" + (f" and the control group {limit:g}" if limit < math.inf else "")
    }
    return Section("Processor", facts, list(judge_processor(usable, probes.environment)), {"usable": usable})


def judge_processor(usable: int, variables: Mapping[str, str]) -> Iterator[Finding]:
    """What is wrong with the number of cores and of OpenMP's threads."""
    if usable == 1:
        text = "This process may use one core only: CPU devices would take turns, so `auto` means one."
        yield Finding(WARNING, text, "give it more: taskset -c 0-1 ..., docker run --cpus 2, or the job's request")
    for name in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"):
        value = variables.get(name, "")
        text = ""
        if value.isdecimal() and int(value) > usable:
            text = f"{name} is {value}, but this process may use {usable} physical cores: threads wait for each other."
        elif value.isdecimal() and int(value) < max(1, usable // 2):
            text = f"{name} is {value}: of {usable} cores, two devices use {2 * int(value)}."
        if text:
            yield Finding(WARNING, text, f"unset {name}")


def check_memory(probes: Probes) -> Section:
    """The memory of the machine and of the control group."""
    sizes = {name: int(value) << 10 for name, value in re.findall(r"^(\w+):\s+(\d+) kB", read("/proc/meminfo"), re.M)}
    limits = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    limit = next((int(text) for text in map(read, limits) if text.strip().isdecimal()), 0)
    available = sizes.get("MemAvailable", 0)
    section = Section("Memory", {"available": f"{available / GB:.1f} GB"}, data={"available": available})
    if 0 < limit < sizes.get("MemTotal", 0):
        section.facts["limit of the control group"] = f"{limit / GB:.1f} GB"
    least = min(available, limit or available)
    if least < _SMALL_MEMORY:
        text = f"Only {least / MB:.0f} MB are available; a small ResNet on two devices takes about 1 GB."
        section.warn(text, "end other programs, or docker run --memory")
    return section


def check_temporary_files(probes: Probes) -> Section:
    """Whether there is a folder for temporary files; without one, the sections that follow use /dev/shm."""
    need = "Launched processes, Open MPI and this report need it."
    section = Section("Temporary files")
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        if os.access("/dev/shm", os.W_OK):
            os.environ["TMPDIR"] = "/dev/shm"
        text = f"No folder for temporary files (/tmp, /var/tmp) can be written to: they are read-only or full. {need}"
        section.fail(text, "export TMPDIR=/dev/shm, or docker run --tmpfs /tmp")
        return section
    _check_space(section, folder, need, "export TMPDIR=/a/folder/with/space")
    return section


def _check_space(section: Section, folder: str, need: str, cure: str) -> None:
    free = shutil.disk_usage(folder).free
    section.data = {"free": free}
    if free < _SMALL_FOLDER:
        section.warn(f"{folder} has {free / MB:.0f} MB free, which is little. {need}", cure)


def check_shared_memory(probes: Probes, folder: str = "/dev/shm") -> Section:
    """Whether files can be made in /dev/shm, which data loaders with processes need."""
    need = "Data loaders with num_workers > 0 need it."
    section = Section("Shared memory")
    if not os.path.isdir(folder):
        section.fail(f"{folder} is not there. {need}", "mount -t tmpfs tmpfs /dev/shm")
        return section
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"doctor")
    except OSError as error:
        writable = "mount -o remount,rw" if error.errno == errno.EROFS else "chmod 1777"
        text = f"{folder} cannot be written to: {error.strerror}. {need}"
        section.fail(text, f"{writable} {folder}, or docker run --shm-size=1g")
    _check_space(section, folder, need, "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm")
    return section


def check_variables(probes: Probes) -> Section:
    """What is wrong with the environment variables. Values that MXNet cannot read, it names itself."""
    return Section("Variables", {}, list(judge_variables(probes.environment)))


def judge_variables(variables: Mapping[str, str]) -> Iterator[Finding]:
    """What is wrong with the variables that are set.

    Example:
        >>> [finding.cure for finding in judge_variables({"MXNET_ENGINE_TYPE": "NaiveEngine"})]
        ['unset MXNET_ENGINE_TYPE']
    """
    if variables.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        text = "MXNET_ENGINE_TYPE is NaiveEngine: one operation at a time, and SyncBatchNorm cannot work."
        yield Finding(FAILED, text, "unset MXNET_ENGINE_TYPE")
    left = sorted(filter(_LAUNCHERS.match, variables))
    if left:
        is_alone = variables.get("DMLC_ROLE", "worker") == "worker" and variables.get("DMLC_NUM_WORKER", "1") == "1"
        words = ", ".join(f"{name}={variables[name]}" for name in left)
        text = f"{words}: a launcher of MXNet's servers sets such variables for the processes that it starts." + (
            "" if is_alone else " A program that is started with them by hand fails, or waits for other processes."
        )
        yield Finding(WARNING if is_alone else FAILED, text, f"unset {' '.join(left)}")
