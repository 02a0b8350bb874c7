"""Sections that processes of their own find out: NumPy, MXNet, GPUs, training, and exchanges over each engine."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from ...mxnet.cuda import is_wheel, libraries, mxnet_folder, problems
from ...mxnet.cuda.driver import DRIVER
from ...mxnet.cuda.wheels import CAPABILITIES, runs_on, wheels_for
from ...store_table import launch_engines
from .machine import Requirement, install_command, requirements
from .probes import PACKAGE, Answer, Probes
from .report import FAILED, INCONCLUSIVE, MORE_TIME, WARNING, Finding, Section

TOLERANCE = 1e-6  # of float64
_PARITY = "gluon-parallel parity --processes 1, and report what it prints"
_GPU_BUILD = ["pip uninstall -y mxnet; pip install --no-deps mxnet-cu112==1.9.1", *wheels_for("mxnet-cu112")]
_OTHER_NAMES = {"yaml": "PyYAML", "sklearn": "scikit-learn", "PIL": "Pillow"}  # of packages, by their modules'


def command_in(message: str) -> str:
    """The first command that an error message advises, or that brings the module it misses; empty if there is none."""
    if variable := re.search(r"^MXNet cannot read (\w+)", message):
        return f"unset {variable.group(1)}"
    if advised := re.search(r"(?:pip|apt-get) install [^;(]+", message):
        return advised.group(0).strip()
    module = re.search(r"No module named '(\w+)", message)
    return install_command(_OTHER_NAMES.get(module.group(1), module.group(1))) if module else ""


def check_numpy(section: Section, probes: Probes) -> None:
    """NumPy's version, and whether it imports."""
    answer = probes.ask("import_numpy")
    if answer.error:
        section.findings.append(
            answer.finding(f"NumPy does not import: {answer.error}.", install_command("numpy", "--force-reinstall"))
        )
        return
    section.facts["version"] = version = answer.found["version"]
    tested = (requirements() or {}).get("numpy", Requirement("numpy", ""))
    if not tested.allows(version):
        section.warn(f"NumPy {version} is outside the tested range, {tested.specifier}.", install_command("numpy"))


def check_mxnet(section: Section, probes: Probes) -> None:
    """MXNet's version and the devices on which it can compute."""
    wheels = sorted({name for name in map(_name, importlib.metadata.distributions()) if name.startswith("mxnet")})
    answer = probes.ask("import_mxnet")
    section.data = found = answer.found
    if len(wheels) > 1:
        text = f"{' and '.join(wheels)} are installed in one folder, where each overwrites the other's files."
        section.warn(text, f"pip uninstall -y {' '.join(wheels)}; pip install --no-deps {wheels[-1]}==1.9.1")
    if "version" not in found:
        again = f"pip install --force-reinstall --no-deps {[*wheels, 'mxnet'][0]}==1.9.1"
        cure = "see GPUs" if "build for GPUs" in answer.error else command_in(answer.error) or again
        section.findings.append(answer.finding(f"MXNet does not import: {answer.error}.", cure))
        return
    section.facts["version"] = found["version"]
    if "auto" in found:
        section.facts["devices"] = ", ".join(found["auto"])
    else:
        section.findings.append(answer.finding(f"MXNet names no devices: {answer.error}.", command_in(answer.error)))


def _name(distribution: importlib.metadata.Distribution) -> str:
    return (distribution.metadata["Name"] or "").lower()


def check_gpus(section: Section, probes: Probes) -> None:
    """Driver, cards and CUDA libraries; without a GPU and without a CUDA build there is nothing wrong."""
    folder = mxnet_folder()
    library = folder / "libmxnet.so" if folder else None
    wanted = libraries.needed(library) if library and library.exists() else []
    answer = probes.ask("ask_cuda", PACKAGE, folder or "", *(name for name in wanted if name != DRIVER))
    driver = answer.found.get("driver", {"error": answer.error or "no answer"})
    missing, facts = answer.found.get("missing", {}), section.facts
    section.data = {"driver": driver, "wanted": wanted, "missing": list(missing)}
    if wanted:
        facts["of MXNet's build:"] = f"CUDA, {', '.join(wanted)}"
        if folder and is_wheel(folder):
            facts["holds code for"] = f"compute capability {', '.join(map(problems.dotted, CAPABILITIES))}"
    facts["driver"] = _describe(driver)
    for number, (name, capability) in enumerate(driver.get("devices", [])):
        facts[f"gpu({number})"] = f"{name}, compute capability {problems.dotted(capability)}"
    if "CUDA_VISIBLE_DEVICES" in probes.environment:
        facts["visible"] = f"CUDA_VISIBLE_DEVICES={probes.environment['CUDA_VISIBLE_DEVICES']}"
    if answer.is_late:
        text = f"The driver and the libraries could not be asked: {answer.error}."
        section.findings.append(answer.finding(text, ""))
        return
    is_cuda_build = bool(wanted)
    if "cuda" in driver or is_cuda_build:
        # For MXNet's build for CPUs, it is what would be wrong with the others.
        verdict = FAILED if is_cuda_build else WARNING
        section.findings += [
            Finding(verdict, *problem)
            for problem in problems.of_driver(driver, not folder or not wanted or is_wheel(folder))
        ]
        usable = sum(runs_on(capability) for _, capability in driver.get("devices", []))
        if usable and driver["cuda"] >= problems.OLDEST_DRIVER and not is_cuda_build:
            text = f"{usable} GPU{'s' if usable > 1 else ''} could be used, but this MXNet is built for CPUs."
            section.warn(text, " ".join(_GPU_BUILD))
    section.findings += [Finding(FAILED, *problem) for problem in problems.of_libraries(missing)]
    section.findings += [Finding(WARNING, *one) for one in problems.of_fusion(driver, answer.found.get("nvrtc", 0))]


def _describe(driver: Mapping[str, Any]) -> str:
    if "cuda" not in driver:
        return "none" if "No such file" in driver["error"] else f"none ({driver['error']})"
    return f"{driver.get('release') or 'release unknown'}, for CUDA up to {problems.version(driver['cuda'])}"


def check_training(section: Section, probes: Probes, obstacle: Optional[Finding] = None) -> None:
    """Train small nets, without and with SyncBatchNorm, unless an `obstacle` says why that cannot be tried."""
    if obstacle:
        section.findings.append(obstacle)
        return
    answer = probes.ask("train_steps")
    rest = answer.found.pop("runs", [])
    section.data = answer.found
    for run, difference in answer.found.items():
        rest.remove(run)
        if not difference <= TOLERANCE:  # also NaN
            text = f"{run}: weights differ from those of one device by {difference:.0e}, more than {TOLERANCE:.0e}."
            section.fail(text, _PARITY)
    if answer.status is None and answer.found:
        text = f"Not tried to the end, for {answer.error}: {', '.join(rest)}."
        section.findings.append(Finding(INCONCLUSIVE, text, MORE_TIME))
    elif answer.error:
        text = f"Steps of {rest[0] if rest else 'a net'} cannot be trained: {answer.error}."
        section.findings.append(answer.finding(text, command_in(answer.error) or _PARITY))
    elif not section.findings:
        section.facts["gives the weights of one device:"] = " and ".join(answer.found)


def check_launch_engine(
    section: Section, probes: Probes, engine: str, options: Sequence[str], obstacle: Optional[Finding] = None
) -> None:
    """Whether an engine is installed, and processes that ``launch`` starts with these options exchange.

    With an `obstacle`, which says why nothing can be tried, they exchange nothing.
    """
    launcher = launch_engines()[engine]
    if absent := launcher.missing(probes.python):
        if launcher.install:
            text = f"Not installed: {' and '.join(absent)}. So there is no store `{launcher.kvstore}`, the fastest one."
            section.warn(text, launcher.install)
        else:
            section.facts["not installed,"] = "and not needed: MPI and ps-lite do the same"
        return
    if trial := launcher.trial(probes.python):
        answer = probes.run(trial)
        if answer.status != 0:
            text = f"{Path(trial[0]).name} does not start: {answer.error}."
            section.findings.append(answer.finding(text, launcher.reinstall))
            return
    if obstacle is not None:
        section.findings.append(obstacle)
        return
    answer = probes.launch(engine, "exchange", options)
    found = section.data = answer.found
    if answer.error:
        text = f"The processes did not exchange everything: {answer.error}."
        section.findings.append(answer.finding(text, _cure(engine, answer)))
    wrong = [size[5:] for size, row in found.items() if size.startswith("size ") and not row["right"]]
    if wrong:
        section.fail(f"The sums of {', '.join(wrong)} were wrong.", "gluon-parallel parity")
    elif "library" in found:
        section.facts["sums of"] = f"{found['processes']} processes: {found['library']}"


def _cure(engine: str, answer: Answer) -> str:
    if command_in(answer.error):
        return command_in(answer.error)
    if "never started" in answer.error and launch_engines()[engine].reinstall:
        return launch_engines()[engine].reinstall
    script = "script.py, with a script of your own, shows all that the processes say"
    return f"gluon-parallel launch -n 2 --engine {engine} {script}"
