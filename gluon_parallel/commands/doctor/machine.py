"""Sections that this process finds out itself: Python, packages, cores, memory, folders and variables."""

from __future__ import annotations

import errno
import importlib.metadata
import math
import os
import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple, Optional

from ... import cores
from .probes import PACKAGE, Probes
from .report import FAILED, WARNING, Finding, Section

PROJECT = "gluon-parallel"
GB, MB = 1 << 30, 1 << 20
_GLUONCV = ("gluoncv", "<0.11,>=0.10.5", "gluoncv")  # not in the metadata, see setup.py
_SKIPPED_EXTRAS = ("all", "test", "cu112", "cu117")  # GPUs have a section of their own
_SMALL_MEMORY = GB  # ResNet-20 with SyncBatchNorm on two devices takes so much
_SMALL_FOLDER = 256 * MB
_LAUNCHERS = re.compile(r"DMLC_(ROLE|NUM_(WORKER|SERVER)|PS_ROOT_(URI|PORT)|(WORKER|SERVER|TASK)_ID|NODE_HOST)$")


class Requirement(NamedTuple):
    """A line of the project's metadata."""

    name: str
    specifier: str  # such as "<2.6,>=1.23"
    extra: str = ""  # the extra that needs it; empty if it is always needed

    @classmethod
    def parse(cls, line: str) -> Requirement:
        """Read a line of metadata. Of its conditions, only ``extra`` counts; those not skipped have no other."""
        words, _, marker = line.partition(";")
        name = re.split(r"[<>=!~ \[]", words, maxsplit=1)[0]
        extra = re.search(r"extra == ['\"](.+?)['\"]", marker)
        return cls(name, words[len(name) :].strip().replace(" ", ""), extra.group(1) if extra else "")

    @property
    def pip(self) -> str:
        """Arguments for ``pip install``, quoted for a shell."""
        options = "--no-deps " if self.name == _GLUONCV[0] else ""
        return f"{options}'{self.name}{','.join(sorted(self.specifier.split(','), reverse=True))}'"

    def allows(self, version: str) -> bool:
        """Whether a version is within the limits of ``>=`` and ``<``; suffixes such as rc1 are ignored.

        Example:
            >>> [Requirement("", "<2.6,>=1.23.0").allows(version) for version in ("2.10.1", "2.6", "1.23", "2.5rc1")]
            [False, False, True, True]
        """
        found = _numbers(version)
        limits = [limit for limit in self.specifier.split(",") if limit]
        return all(found >= _numbers(limit) if limit.startswith(">=") else found < _numbers(limit) for limit in limits)


def _numbers(version: str) -> list[int]:
    numbers = [int(number) for number in re.findall(r"\d+", re.sub(r"[^<>=\d.].*", "", version))]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def requirements() -> Optional[dict[str, Requirement]]:
    """What the installed package needs, by name; None if it runs from its folder, uninstalled."""
    try:
        lines = importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    known = [*map(Requirement.parse, lines), Requirement(*_GLUONCV)]
    return {one.name: one for one in known if one.extra not in _SKIPPED_EXTRAS}


def install_command(name: str, *options: str) -> str:
    """The command that installs a package, in the range that was tested if there is one."""
    known = requirements() or {}
    return " ".join(["pip install", *options, known[name].pip if name in known else name])


def version_of(name: str) -> str:
    """The installed version of a package; empty if there is none."""
    try:
        return importlib.metadata.version(name) or ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def read(path: str) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def check_python(section: Section, probes: Probes) -> None:
    """Python's version, and the system under it."""
    libc = " ".join(platform.libc_ver()).strip()
    name = re.search(r'^PRETTY_NAME="?(.*?)"?$', read("/etc/os-release"), re.MULTILINE)
    system = name.group(1) if name else platform.system()
    version = platform.python_version()
    section.facts[version] = f"{sys.executable} on {system}, {platform.machine()}, {libc or 'not the GNU C library'}"
    tested = importlib.metadata.metadata(PROJECT)["Requires-Python"] or "" if requirements() is not None else ""
    if not Requirement("Python", tested).allows(version):
        text = f"Python {version} is outside the tested range, {tested}."
        section.warn(text, "python3.12 -m venv .venv, and install into it")
    if not libc.startswith("glibc"):
        text = "MXNet's wheels need the GNU C library, which this system (such as Alpine) does not have."
        section.fail(text, "take an image of Debian, Ubuntu or Fedora")
    try:
        import ctypes  # noqa: F401
    except ImportError as error:
        text = f"This Python cannot call C libraries, which MXNet needs: {error}."
        section.fail(text, "apt-get install libffi-dev and build Python again, or take another")


def check_packages(section: Section, probes: Probes) -> None:
    """All packages but NumPy that the project needs, and those of extras that are installed."""
    wanted = requirements()
    if wanted is None:
        text = "gluon_parallel is not installed here but runs from its folder, so the tested ranges are not known."
        section.warn(text, f"pip install -e {PACKAGE.parent}")
    for one in (wanted or {}).values():
        version = version_of(one.name)
        if one.name == "numpy" or not version and one.extra:
            continue
        if not version:
            section.fail(f"{one.name} is not installed.", f"pip install {one.pip}")
        elif not one.allows(version):
            text = f"{one.name} {version} is outside the tested range, {one.specifier}."
            section.warn(text, f"pip install {one.pip}")


def check_processor(section: Section, probes: Probes) -> None:
    """The cores that this process may use, and the threads that OpenMP is told to use."""
    usable, limit = cores.num_physical(), cores.cpu_limit()
    affinity = f"{len(os.sched_getaffinity(0))}" + (f" and the control group {limit:g}" if limit < math.inf else "")
    section.facts["cores"] = f"{usable} physical, {os.cpu_count() or 1} logical, of which affinity allows {affinity}"
    section.data = {"usable": usable}
    if usable == 1:
        text = "This process may use one core only: CPU devices would take turns, so `auto` means one."
        section.warn(text, "give it more: taskset -c 0-1 ..., docker run --cpus 2, or the job's request")
    for name in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"):
        value = probes.environment.get(name, "")
        if value.isdecimal() and int(value) > usable:
            text = f"{name} is {value}, but this process may use {usable} physical cores: threads wait for each other."
            section.warn(text, f"unset {name}")
        elif value.isdecimal() and int(value) < max(1, usable // 2):
            section.warn(f"{name} is {value}: of {usable} cores, two devices use {2 * int(value)}.", f"unset {name}")


def check_memory(section: Section, probes: Probes) -> None:
    """The memory of the machine and of the control group."""
    sizes = {name: int(value) << 10 for name, value in re.findall(r"^(\w+):\s+(\d+) kB", read("/proc/meminfo"), re.M)}
    limits = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    limit = next((int(text) for text in map(read, limits) if text.strip().isdecimal()), 0)
    available = sizes.get("MemAvailable", 0)
    section.facts["available"], section.data = f"{available / GB:.1f} GB", {"available": available}
    if 0 < limit < sizes.get("MemTotal", 0):
        section.facts["limit of the control group"] = f"{limit / GB:.1f} GB"
    least = min(available, limit or available)
    if least < _SMALL_MEMORY:
        text = f"Only {least / MB:.0f} MB are available; a small ResNet on two devices takes about 1 GB."
        section.warn(text, "end other programs, or docker run --memory")


def check_temporary_files(section: Section, probes: Probes) -> None:
    """Whether there is a folder for temporary files; without one, the sections that follow use /dev/shm."""
    need = "Launched processes, Open MPI and this report need it."
    try:
        _check_space(section, tempfile.gettempdir(), need, "export TMPDIR=/a/folder/with/space")
    except FileNotFoundError:
        if os.access("/dev/shm", os.W_OK):
            os.environ["TMPDIR"] = "/dev/shm"
        text = f"No folder for temporary files (/tmp, /var/tmp) can be written to: they are read-only or full. {need}"
        section.fail(text, "export TMPDIR=/dev/shm, or docker run --tmpfs /tmp")


def check_shared_memory(section: Section, probes: Probes, folder: str = "/dev/shm") -> None:
    """Whether files can be made in /dev/shm, which data loaders with processes need."""
    need = "Data loaders with num_workers > 0 need it."
    if not os.path.isdir(folder):
        section.fail(f"{folder} is not there. {need}", "mount -t tmpfs tmpfs /dev/shm")
        return
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"doctor")
    except OSError as error:
        writable = "mount -o remount,rw" if error.errno == errno.EROFS else "chmod 1777"
        text = f"{folder} cannot be written to: {error.strerror}. {need}"
        section.fail(text, f"{writable} {folder}, or docker run --shm-size=1g")
    _check_space(section, folder, need, "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm")


def _check_space(section: Section, folder: str, need: str, cure: str) -> None:
    free = shutil.disk_usage(folder).free
    section.data = {"free": free}
    if free < _SMALL_FOLDER:
        section.warn(f"{folder} has {free / MB:.0f} MB free, which is little. {need}", cure)


def check_variables(section: Section, probes: Probes) -> None:
    """What is wrong with the environment variables. Values that MXNet cannot read, it names itself."""
    variables = probes.environment
    if variables.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        text = "MXNET_ENGINE_TYPE is NaiveEngine: one operation at a time, and SyncBatchNorm cannot work."
        section.fail(text, "unset MXNET_ENGINE_TYPE")
    left = sorted(filter(_LAUNCHERS.match, variables))
    if left:
        is_alone = variables.get("DMLC_ROLE", "worker") == "worker" and variables.get("DMLC_NUM_WORKER", "1") == "1"
        words = ", ".join(f"{name}={variables[name]}" for name in left)
        text = f"{words}: a launcher of MXNet's servers sets such variables for the processes that it starts." + (
            "" if is_alone else " A program that is started with them by hand fails, or waits for other processes."
        )
        section.findings.append(Finding(WARNING if is_alone else FAILED, text, f"unset {' '.join(left)}"))
