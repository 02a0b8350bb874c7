"""Sections on MXNet: its build and what makes it importable, and the GPUs for it."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...cuda import fat_binary, libraries, mxnet_folder, problems
from ...cuda.driver import DRIVER
from ...cuda.wheels import wheels_for
from .packages import install_command
from .probes import PACKAGE, Probes
from .report import FAILED, WARNING, Finding, Section

_GPU_BUILD = ["pip uninstall -y mxnet; pip install --no-deps mxnet-cu112==1.9.1", *wheels_for("mxnet-cu112")]
_OTHER_NAMES = {"yaml": "PyYAML", "sklearn": "scikit-learn", "PIL": "Pillow"}  # of packages, by their modules'


def command_in(message: str) -> str:
    """The first command that an error message advises, or that brings the module it misses; empty if there is none.

    Example:
        >>> command_in("Install it: pip install --no-deps 'mxnet==1.9.1' (or, for NVIDIA GPUs, mxnet-cu112)")
        "pip install --no-deps 'mxnet==1.9.1'"
        >>> command_in("MXNet cannot read OMP_NUM_THREADS='all'")
        'unset OMP_NUM_THREADS'
        >>> command_in("ModuleNotFoundError: No module named 'yaml.reader'")
        "pip install 'PyYAML>=6.0,<7'"
    """
    variable = re.search(r"^MXNet cannot read (\w+)", message)
    if variable:
        return f"unset {variable.group(1)}"
    advised = re.search(r"(?:pip|apt-get) install [^;(]+", message)
    if advised:
        return advised.group(0).strip()
    module = re.search(r"No module named '(\w+)", message)
    return install_command(_OTHER_NAMES.get(module.group(1), module.group(1))) if module else ""


def check_mxnet(probes: Probes) -> Section:
    """MXNet's version and the devices on which it can compute."""
    wheels = sorted({name for name in map(_name, importlib.metadata.distributions()) if name.startswith("mxnet")})
    answer = probes.ask("import_mxnet")
    found = answer.found
    section = Section("MXNet", data=found)
    if "version" in found:
        section.facts["version"] = found["version"]
        if "auto" in found:
            section.facts["devices"] = ", ".join(found["auto"])
        else:
            section.findings.append(
                answer.finding(f"MXNet names no devices: {answer.error}.", command_in(answer.error))
            )
    if len(wheels) > 1:
        text = f"{' and '.join(wheels)} are installed in one folder, where each overwrites the other's files."
        cure = f"pip uninstall -y {' '.join(wheels)}; pip install --no-deps {wheels[-1]}==1.9.1"
        section.warn(text, cure)
    if "version" not in found:
        again = f"pip install --force-reinstall --no-deps {[*wheels, 'mxnet'][0]}==1.9.1"
        cure = "see GPUs" if "build for GPUs" in answer.error else command_in(answer.error) or again
        section.findings.append(answer.finding(f"MXNet does not import: {answer.error}.", cure))
    return section


def _name(distribution: importlib.metadata.Distribution) -> str:
    return (distribution.metadata["Name"] or "").lower()


def check_gpus(probes: Probes) -> Section:
    """The section; without a GPU and without a CUDA build there is nothing wrong."""
    folder = mxnet_folder()
    library = folder / "libmxnet.so" if folder else None
    wanted = libraries.needed(library) if library and library.exists() else []
    code = fat_binary.read(library) if library and wanted else ()
    answer = probes.ask("ask_cuda", PACKAGE, folder or "", *(name for name in wanted if name != DRIVER))
    driver = answer.found.get("driver", {"error": answer.error or "no answer"})
    missing = answer.found.get("missing", {})
    facts: dict = {"of MXNet's build:": f"CUDA, {', '.join(wanted)}"} if wanted else {}
    if code:
        facts["holds code for"] = f"compute capability {fat_binary.describe(code)}"
    facts["driver"] = _describe(driver)
    for number, (name, capability) in enumerate(driver.get("devices", [])):
        facts[f"gpu({number})"] = f"{name}, compute capability {fat_binary.dotted(capability)}"
    if "CUDA_VISIBLE_DEVICES" in probes.environment:
        facts["visible"] = f"CUDA_VISIBLE_DEVICES={probes.environment['CUDA_VISIBLE_DEVICES']}"
    if answer.is_late:
        text = f"The driver and the libraries could not be asked: {answer.error}."
        return Section("GPUs", facts, [answer.finding(text, "")])
    findings = list(judge_gpus(driver, bool(wanted), code or fat_binary.WHEELS))
    findings += [Finding(FAILED, *problem) for problem in problems.of_libraries(missing)]
    findings += [Finding(WARNING, *problem) for problem in problems.of_fusion(driver, answer.found.get("nvrtc", 0))]
    return Section("GPUs", facts, findings, {"driver": driver, "wanted": wanted, "missing": list(missing)})


def _describe(driver: Mapping[str, Any]) -> str:
    if "cuda" not in driver:
        return "none" if "No such file" in driver["error"] else f"none ({driver['error']})"
    return f"{driver.get('release') or 'release unknown'}, for CUDA up to {problems.version(driver['cuda'])}"


def judge_gpus(driver: Mapping[str, Any], cuda_build: bool, code: tuple[fat_binary.Code, ...]) -> Iterator[Finding]:
    """What is wrong with the driver, by its answers, and the cards, given what MXNet's library holds or would hold.

    For MXNet's build for CPUs, it is what would be wrong with the others, as a warning.

    Example:
        >>> [finding.verdict for finding in judge_gpus({"cuda": 10020, "devices": []}, True, fat_binary.WHEELS)]
        ['failed']
    """
    if "cuda" not in driver and not cuda_build:
        return
    for problem in problems.of_driver(driver, code):
        yield Finding(FAILED if cuda_build else WARNING, *problem)
    usable = sum(fat_binary.runs_on(code, capability) for _, capability in driver.get("devices", []))
    if usable and driver["cuda"] >= problems.OLDEST_DRIVER and not cuda_build:
        text = f"{usable} GPU{'s' if usable > 1 else ''} could be used, but this MXNet is built for CPUs."
        yield Finding(WARNING, text, " ".join(_GPU_BUILD))
