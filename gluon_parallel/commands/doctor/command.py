"""What the command `doctor` does: it makes one section after the other, and prints the verdict and what to type."""

from __future__ import annotations

import datetime
import itertools
import json
import sys
import time
from typing import Any, Callable, Optional

from ... import __version__
from ...errors import ConfigError
from ...launch_engines import ENGINES
from . import machine, mxnet_build, packages, report, trials
from .probes import Probes
from .report import FAILED, INCONCLUSIVE, MORE_TIME, TIMEOUT, WARNING, Finding, Section

MOST_SECONDS = 1e6


def configure(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("--json", action="store_true", help="print one JSON object in the place of text")
    parser.add_argument("--hosts", metavar="h1:1,h2:1", help="try the engines between these hosts as well")
    parser.add_argument("--rsh", default="ssh", help="the command that runs another one on a host (ssh)")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT, metavar="SECONDS",
        help=f"for the whole report ({TIMEOUT:g}); sections that need more time are inconclusive",
    )  # fmt: skip


def main(options: Any) -> int:
    """Print the report; returns 0 if training works, here and between hosts that are named, and nothing has failed."""
    if not 0 < options.timeout <= MOST_SECONDS:
        raise ConfigError(f"--timeout is {options.timeout:g}, wanted seconds above 0 and up to {MOST_SECONDS:g}")
    sections, works = examine(Probes(time.monotonic() + options.timeout), options.hosts, options.rsh)
    now = datetime.datetime.now(datetime.timezone.utc)
    head = f"gluon_parallel {__version__}, {now:%Y-%m-%d %H:%M} UTC"
    if options.json:
        found = {"report": head, "training_works": works, "sections": [report.as_json(section) for section in sections]}
        print(json.dumps(json.loads(json.dumps(found), parse_constant=str), indent=1))  # NaN is no JSON
    else:
        print("\n".join([head, *_summary(sections, works), "", report.text(sections)]))
    return 0 if works and not any(section.verdict == FAILED for section in sections) else 1


def examine(probes: Probes, hosts: Optional[str], rsh: str) -> tuple[list[Section], Optional[bool]]:
    """All sections, and whether training works; None if the time was too short to know.

    Engines are tried between `hosts`, ``h1:1,h2:1`` or None, as well; `rsh` runs a command on a host.
    """
    sections: list[Section] = []

    def add(name: str, check: Callable[..., Section], *args: Any) -> Section:
        if sys.stderr.isatty():
            print(f"\r{name + ' ...':40}", end="\r", file=sys.stderr, flush=True)
        try:
            sections.append(check(probes, *args))
        except Exception as error:  # a section that fails is a finding, and the others follow
            said = f"The doctor itself failed here: {type(error).__name__}: {error}."
            sections.append(Section(name, {}, [Finding(FAILED, said, "report it, with this text")]))
        return sections[-1]

    for name, check in (
        ("Python", packages.check_python), ("Temporary files", machine.check_temporary_files),
        ("Packages", packages.check_packages), ("Variables", machine.check_variables),
        ("Processor", machine.check_processor), ("Memory", machine.check_memory),
        ("Shared memory", machine.check_shared_memory), ("GPUs", mxnet_build.check_gpus),
    ):  # fmt: skip
        add(name, check)
    missing = add("NumPy", packages.check_numpy)
    if missing.verdict not in (FAILED, INCONCLUSIVE):
        missing = add("MXNet", mxnet_build.check_mxnet)
    obstacle = None
    if "version" not in missing.facts:  # which it tells once it is imported
        late = missing.verdict == INCONCLUSIVE
        words = f"Not tried: {missing.name} did not import{' in time' if late else ''}."
        obstacle = Finding(INCONCLUSIVE if late else FAILED, words, MORE_TIME if late else f"see {missing.name}")
    works = trials.works(add("Training", trials.check_training, obstacle))
    if obstacle is not None and obstacle.verdict == FAILED:
        obstacle = obstacle._replace(verdict=WARNING)
    between = []
    for engine, launcher in ENGINES.items():
        add(launcher.library, trials.check_engine, engine, None, rsh, obstacle)
        if hosts and obstacle is None:
            between.append(add(f"{launcher.library} between hosts", trials.check_engine, engine, hosts, rsh))
    return sections, exchanged(between) if works and hosts else works


def exchanged(sections: list[Section]) -> Optional[bool]:
    """Whether processes on the hosts have exchanged; None if the time was too short to know."""
    verdicts = {section.verdict for section in sections if section.data or section.verdict != WARNING}
    return False if FAILED in verdicts or not verdicts else True if verdicts - {INCONCLUSIVE} else None


def _summary(sections: list[Section], works: Optional[bool]) -> list[str]:
    if works is None:
        words = ["Training was not tried to the end"]
    else:
        words = ["Training works here" if works else "Training does NOT work here"]
    for verdict, said in ((FAILED, FAILED), (INCONCLUSIVE, "not finished in time"), (WARNING, WARNING)):
        names = [section.name for section in sections if section.verdict == verdict]
        words += [f"{said}: {', '.join(names)}"] if names else []
    cures = (f"Begin with {section.name}: {finding.cure}" for verdict in (FAILED, INCONCLUSIVE) for section in sections
             for finding in section.findings if finding.verdict == verdict and finding.cure)  # fmt: skip
    return ["; ".join(words), *itertools.islice(cures, 1)]
