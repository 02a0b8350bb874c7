"""Sections on MXNet (version, build, what makes it importable), on devices, and on Numba's cache."""

from __future__ import annotations

import importlib.metadata
import re

from .packages import install
from .probes import PACKAGE, Answer, Probes
from .report import Section

_OTHER_NAMES = {"yaml": "PyYAML", "sklearn": "scikit-learn", "PIL": "Pillow"}  # of packages, by their modules'


def command_in(message: str) -> str:
    """The first command that an error message advises, or that brings the module it misses; empty if there is none.

    Example:
        >>> command_in("Install it: pip install --no-deps 'mxnet==1.9.1' (or, for NVIDIA GPUs, mxnet-cu112)")
        "pip install --no-deps 'mxnet==1.9.1'"
        >>> command_in("ModuleNotFoundError: No module named 'llvmlite.binding'")
        'pip install llvmlite'
        >>> command_in("ImportError: Numba needs NumPy 2.5 or less. Got NumPy 2.9")
        "pip install 'numpy>=1.23,<2.6'"
    """
    if "Numba needs NumPy" in message:
        return install("numpy")
    advised = re.search(r"(?:pip|apt-get) install [^;(]+", message)
    if advised:
        return advised.group(0).strip()
    module = re.search(r"No module named '(\w+)", message)
    return install(_OTHER_NAMES.get(module.group(1), module.group(1))) if module else ""


def check_mxnet(probes: Probes) -> tuple[Section, Answer]:
    """MXNet's version, its build, and the names that were put back for it; and the probe's answer."""
    wheels = sorted({name for name in map(_name, importlib.metadata.distributions()) if name.startswith("mxnet")})
    answer = probes.ask("import_mxnet")
    found = answer.found
    section = Section("MXNet", {"wheels": ", ".join(wheels) or "none"}, data=found)
    if "version" in found:
        section.facts["version"] = f"{found['version']} in {found['folder']}, imported in {found['seconds']:.1f} s"
        section.facts["build"] = ", ".join(found["features"])
        section.facts["put back into NumPy"] = ", ".join(found["restored"]) or "no name was missing"
        section.facts["distutils"] = found["distutils"]
    if len(wheels) > 1:
        text = f"{' and '.join(wheels)} are installed in one folder, where each overwrites the other's files."
        cure = f"pip uninstall -y {' '.join(wheels)}; pip install --no-deps {wheels[-1]}==1.9.1"
        section.warn(text, cure)
    if "version" not in found:
        again = f"pip install --force-reinstall --no-deps {[*wheels, 'mxnet'][0]}==1.9.1"
        cure = "see GPUs above" if "build for GPUs" in answer.error else command_in(answer.error) or again
        section.findings.append(answer.finding(f"MXNet does not import: {answer.error}.", cure))
    return section, answer


def _name(distribution: importlib.metadata.Distribution) -> str:
    return (distribution.metadata["Name"] or "").lower()


def check_devices(answer: Answer) -> Section:
    """The devices on which MXNet can compute, from the same answer."""
    if "auto" not in answer.found:
        return Section("Devices", {}, [answer.finding(f"MXNet names no devices: {answer.error}.", "")])
    return Section("Devices", {"auto means": ", ".join(answer.found["auto"]), "GPUs": str(answer.found["gpus"])}, [])


def check_numba(probes: Probes) -> Section:
    """Whether compiled code can be kept, and is there already."""
    answer = probes.ask("find_compiled", PACKAGE)
    found = answer.found
    if "version" not in found:
        cure = command_in(answer.error) or install("numba", "--force-reinstall")
        return Section("Numba", {}, [answer.finding(f"Numba does not import: {answer.error}.", cure)])
    section = Section("Numba", {"version": found["version"]}, data=found)
    section.facts["cache"] = found.get("folder") or "none that can be written to"
    if not found.get("folder"):
        text = "There is no folder that Numba can keep compiled code in: every process compiles SyncBatchNorm and the "
        section.warn(f"{text}store mpi anew, for 20 s.", "export NUMBA_CACHE_DIR=/a/folder/of/yours")
    elif "kept" in found:
        rest = "" if found["kept"] == found["files"] else "; the rest when first used, in 20 s"
        section.facts["compiled"] = f"{found['kept']} of {found['files']} files{rest}"
    return section
