"""Section on NVIDIA GPUs: the driver's answers, the cards, and the CUDA libraries that this MXNet asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...cuda import fat_binary, libraries, mxnet_folder, problems
from ...cuda.driver import DRIVER
from ...cuda.wheels import wheels_for
from .probes import PACKAGE, Probes
from .report import FAILED, WARNING, Finding, Section

_GPU_BUILD = ["pip uninstall -y mxnet; pip install --no-deps mxnet-cu112==1.9.1", *wheels_for("mxnet-cu112")]


def check(probes: Probes) -> Section:
    """The section; without a GPU and without a CUDA build there is nothing wrong."""
    folder = mxnet_folder()
    library = folder / "libmxnet.so" if folder else None
    wanted = libraries.needed(library) if library and library.exists() else []
    code = fat_binary.read(library) if library and wanted else ()
    answer = probes.ask("ask_cuda", PACKAGE, folder or "", *(name for name in wanted if name != DRIVER))
    driver = answer.found.get("driver", {"error": answer.error or "no answer"})
    missing = answer.found.get("missing", {})
    build = f"CUDA, asks for {', '.join(wanted)}" if wanted else "for CPUs" if folder else "not installed"
    facts: dict = {"MXNet's build": build}
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
    findings = list(judge(driver, bool(wanted), code or fat_binary.WHEELS))
    findings += [Finding(FAILED, *problem) for problem in problems.of_libraries(missing)]
    findings += [Finding(WARNING, *problem) for problem in problems.of_fusion(driver, answer.found.get("nvrtc", 0))]
    return Section("GPUs", facts, findings, {"driver": driver, "wanted": wanted, "missing": list(missing)})


def _describe(driver: Mapping[str, Any]) -> str:
    if "cuda" not in driver:
        return "none" if "No such file" in driver["error"] else f"none ({driver['error']})"
    return f"{driver.get('release') or 'release unknown'}, for CUDA up to {problems.version(driver['cuda'])}"


def judge(driver: Mapping[str, Any], cuda_build: bool, code: tuple[fat_binary.Code, ...]) -> Iterator[Finding]:
    """What is wrong with the driver, by its answers, and the cards, given what MXNet's library holds or would hold.

    For MXNet's build for CPUs, it is what would be wrong with the others, as a warning.

    Example:
        >>> [finding.verdict for finding in judge({"cuda": 10020, "devices": []}, True, fat_binary.WHEELS)]
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
