"""Sections on Python, NumPy and all other packages: their versions against the ranges that were tested."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from typing import NamedTuple, Optional

from .machine import read
from .probes import PACKAGE, Probes
from .report import Section

PROJECT = "gluon-parallel"
_GLUONCV = ("gluoncv", "<0.11,>=0.10.5", "gluoncv")  # not in the metadata, see setup.py
_SKIPPED_EXTRAS = ("all", "test", "cu112", "cu117")  # GPUs have a section of their own


class Requirement(NamedTuple):
    """A line of the project's metadata."""

    name: str
    specifier: str  # such as "<2.6,>=1.23"
    extra: str  # the extra that needs it; empty if it is always needed

    @property
    def pip(self) -> str:
        """Arguments for ``pip install``, quoted for a shell."""
        options = "--no-deps " if self.name == _GLUONCV[0] else ""
        return f"{options}'{self.name}{','.join(sorted(self.specifier.split(','), reverse=True))}'"


def parse(line: str) -> Requirement:
    """Read a line of metadata. Of its conditions, only ``extra`` counts; those that are not skipped have no other.

    Example:
        >>> parse('mpi4py<5,>=4.1; extra == "mpi"')
        Requirement(name='mpi4py', specifier='<5,>=4.1', extra='mpi')
    """
    words, _, marker = line.partition(";")
    name = re.split(r"[<>=!~ \[]", words, maxsplit=1)[0]
    extra = re.search(r"extra == ['\"](.+?)['\"]", marker)
    return Requirement(name, words[len(name) :].strip().replace(" ", ""), extra.group(1) if extra else "")


def requirements() -> Optional[list[Requirement]]:
    """What the installed package needs; None if it runs from its folder, uninstalled."""
    try:
        lines = importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return [wanted for wanted in [*map(parse, lines), Requirement(*_GLUONCV)] if wanted.extra not in _SKIPPED_EXTRAS]


def install_command(name: str, *options: str) -> str:
    """The command that installs a package, in the range that was tested if there is one."""
    known = {wanted.name: wanted.pip for wanted in requirements() or []}
    return " ".join(["pip install", *options, known.get(name, name)])


def is_within(version: str, specifier: str) -> bool:
    """Whether a version is within limits of ``>=`` and ``<``, as the project's metadata use.

    Suffixes such as rc1 are ignored.

    Example:
        >>> is_within("2.10.1", "<2.11,>=1.23"), is_within("2.6", "<2.6,>=1.23"), is_within("1.23", ">=1.23.0")
        (True, False, True)
    """
    found = _numbers(version)
    limits = [limit for limit in specifier.split(",") if limit]
    return all(found >= _numbers(limit) if limit.startswith(">=") else found < _numbers(limit) for limit in limits)


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(number) for number in re.findall(r"\d+", re.sub(r"[^<>=\d.].*", "", version))]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def version_of(name: str) -> str:
    """The installed version of a package; empty if there is none."""
    try:
        return importlib.metadata.version(name) or ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_python(probes: Probes) -> Section:
    """Python's version, and the system under it."""
    libc = " ".join(platform.libc_ver())
    name = re.search(r'^PRETTY_NAME="?(.*?)"?$', read("/etc/os-release"), re.MULTILINE)
    system = name.group(1) if name else platform.system()
    machine = f"{system}, {platform.machine()}, {libc.strip() or 'not the GNU C library'}"
    section = Section("Python", {platform.python_version(): f"{sys.executable} on {machine}"})
    tested = ""
    if requirements() is not None:
        tested = importlib.metadata.metadata(PROJECT)["Requires-Python"] or ""
    if not is_within(platform.python_version(), tested):
        text = f"Python {platform.python_version()} is outside the tested range, {tested}."
        section.warn(text, "python3.12 -m venv .venv, and install into it")
    if not libc.startswith("glibc"):
        text = "MXNet's wheels need the GNU C library, which this system (such as Alpine) does not have."
        section.fail(text, "take an image of Debian, Ubuntu or Fedora")
    try:
        import ctypes  # noqa: F401
    except ImportError as error:
        text = f"This Python cannot call C libraries, which MXNet needs: {error}."
        section.fail(text, "apt-get install libffi-dev and build Python again, or take another")
    return section


def check_numpy(probes: Probes) -> Section:
    """NumPy's version, and whether it imports."""
    ranges = {wanted.name: wanted for wanted in requirements() or []}
    tested = ranges["numpy"].specifier if "numpy" in ranges else ""
    answer = probes.ask("import_numpy")
    if answer.error:
        finding = answer.finding(
            f"NumPy does not import: {answer.error}.", install_command("numpy", "--force-reinstall")
        )
        return Section("NumPy", {}, [finding])
    section = Section("NumPy", {"version": answer.found["version"]})
    if not is_within(answer.found["version"], tested):
        text = f"NumPy {answer.found['version']} is outside the tested range, {tested}."
        section.warn(text, install_command("numpy"))
    return section


def check_packages(probes: Probes) -> Section:
    """All other packages that the project needs, and those of extras that are installed."""
    wanted = requirements()
    section = Section("Packages")
    if wanted is None:
        text = "gluon_parallel is not installed here but runs from its folder, so the tested ranges are not known."
        section.warn(text, f"pip install -e {PACKAGE.parent}")
        return section
    for one in wanted:
        version = version_of(one.name)
        if not version and one.extra:
            continue
        elif one.name == "numpy" and not is_within(version, one.specifier):
            continue  # the section on NumPy says so
        elif not version:
            section.fail(f"{one.name} is not installed.", f"pip install {one.pip}")
        elif not is_within(version, one.specifier):
            text = f"{one.name} {version} is outside the tested range, {one.specifier}."
            section.warn(text, f"pip install {one.pip}")
    return section
