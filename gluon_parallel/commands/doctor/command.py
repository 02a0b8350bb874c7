"""What the command `doctor` does: it makes one section after the other, and prints the verdict and what to type."""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
import time
from typing import Any, Callable, Optional

from ... import __version__
from ...errors import ConfigError
from ...store_table import launch_engines
from . import machine, report, trials
from .probes import Probes
from .report import FAILED, INCONCLUSIVE, MORE_TIME, TIMEOUT, WARNING, Finding, Section

MOST_SECONDS = 1e6
_GRACE = 5.0  # seconds after the limit, within which a process that is ended leaves


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
    sections: list[Section] = []

    def tell(works: Optional[bool]) -> None:
        head = f"gluon_parallel {__version__}, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC"
        if options.json:
            found = {"report": head, "training_works": works, "sections": list(map(report.as_json, sections))}
            print(json.dumps(json.loads(json.dumps(found), parse_constant=str), indent=1))  # NaN is no JSON
        else:
            print("\n".join([head, *_summary(sections, works), "", report.text(sections)]), flush=True)

    def end() -> None:
        """End this process where it waits itself: only processes that it has started have a limit of their own."""
        said = f"No answer within {options.timeout:g} s: the machine is slow, or a file system (that of TMPDIR?) hangs."
        if not sections:
            sections.append(Section("Start"))
        sections[-1].fail(said, f"{MORE_TIME}; if that ends here too, export TMPDIR=/dev/shm, and see /proc/mounts")
        tell(False)
        os._exit(1)

    watchdog = threading.Timer(options.timeout + _GRACE, end)
    watchdog.daemon = True
    watchdog.start()
    works = examine(sections, Probes(time.monotonic() + options.timeout), options.hosts, options.rsh)
    watchdog.cancel()
    tell(works)
    return 0 if works and not any(section.verdict == FAILED for section in sections) else 1


def examine(sections: list[Section], probes: Probes, hosts: Optional[str], rsh: str) -> Optional[bool]:
    """Append all sections; returns whether training works, or None if the time was too short to know.

    Engines are tried between `hosts`, ``h1:1,h2:1`` or None, as well; `rsh` runs a command on a host.
    """

    def add(name: str, check: Callable[..., None], *args: Any) -> Section:
        if sys.stderr.isatty():
            print(f"\r{name + ' ...':40}", end="\r", file=sys.stderr, flush=True)
        section = Section(name)
        sections.append(section)  # now, for the watchdog
        try:
            check(section, probes, *args)
        except Exception as error:  # a section that fails is a finding, and the others follow
            said = f"The doctor itself failed here: {type(error).__name__}: {error}."
            section.fail(said, "report it, with this text")
        return section

    for name, check in (
        ("Python", machine.check_python), ("Temporary files", machine.check_temporary_files),
        ("Packages", machine.check_packages), ("Variables", machine.check_variables),
        ("Processor", machine.check_processor), ("Memory", machine.check_memory),
        ("Shared memory", machine.check_shared_memory), ("GPUs", trials.check_gpus),
    ):  # fmt: skip
        add(name, check)
    missing = add("NumPy", trials.check_numpy)
    if missing.verdict not in (FAILED, INCONCLUSIVE):
        missing = add("MXNet", trials.check_mxnet)
    obstacle = None
    if "version" not in missing.facts:  # which it tells once it is imported
        late = missing.verdict == INCONCLUSIVE
        words = f"Not tried: {missing.name} did not import{' in time' if late else ''}."
        obstacle = Finding(INCONCLUSIVE if late else FAILED, words, MORE_TIME if late else f"see {missing.name}")
    training = add("Training", trials.check_training, obstacle)
    works = False if training.verdict == FAILED else True if training.data else None
    if obstacle is not None and obstacle.verdict == FAILED:
        obstacle = obstacle._replace(verdict=WARNING)
    between = []
    for engine, launcher in launch_engines().items():
        add(launcher.library, trials.check_launch_engine, engine, ["-n", "2"], obstacle)
        if hosts and obstacle is None:
            options = ["--hosts", hosts, "--rsh", rsh]
            between.append(add(f"{launcher.library} between hosts", trials.check_launch_engine, engine, options))
    return exchanged(between) if works and hosts else works


def exchanged(sections: list[Section]) -> Optional[bool]:
    """Whether processes on the hosts have exchanged; None if the time was too short to know."""
    verdicts = {section.verdict for section in sections if section.data or section.verdict != WARNING}
    return False if FAILED in verdicts or not verdicts else True if verdicts - {INCONCLUSIVE} else None


def _summary(sections: list[Section], works: Optional[bool]) -> list[str]:
    words = {
        None: "Training was not tried to the end",
        True: "Training works here",
        False: "Training does NOT work here",
    }
    line, first = words[works], []
    for verdict, said in ((FAILED, FAILED), (INCONCLUSIVE, "not finished in time"), (WARNING, WARNING)):
        names = [section.name for section in sections if section.verdict == verdict]
        line += f"; {said}: {', '.join(names)}" if names else ""
        first += [f"Begin with {section.name}: {finding.cure}" for section in sections for finding in section.findings
                  if finding.verdict == verdict != WARNING and finding.cure]  # fmt: skip
    return [line, *first[:1]]
