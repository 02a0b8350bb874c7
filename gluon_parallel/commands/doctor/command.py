"""What the command `doctor` does: one section after the other, each within its limit; then it prints the verdict."""

from __future__ import annotations

import datetime
import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, Optional

from ... import __version__
from ...errors import ConfigError
from ...launch_engines import ENGINES
from . import machine, mxnet_build, packages, report, trials, variables
from .probes import Probes, end_all
from .report import FAILED, INCONCLUSIVE, MORE_TIME, TIMEOUT, VERDICTS, WARNING, Finding, Section

_BETWEEN_HOSTS = " between hosts"
MOST_SECONDS = 1e6
GRACE = 5.0  # seconds in which a probe that took too long ends what it has started


class Part(NamedTuple):
    """A section that is to be made."""

    name: str
    limit: float  # seconds
    make: Callable[[Probes], Section]


class Sections:
    """All sections, in their order; what one of them finds out decides about those behind it.

    Engines are tried between `hosts`, ``h1:1,h2:1`` or None, as well; `rsh` runs a command on a host.
    """

    def __init__(self, hosts, rsh):
        self.hosts, self.rsh = hosts, rsh
        self.missing: Optional[Section] = None  # the first of NumPy and MXNet that does not import
        self.trains: Optional[bool] = None

    def __iter__(self) -> Iterator[Part]:
        yield Part("Python", 5, packages.check_python)
        yield Part("Temporary files", 5, machine.check_temporary_files)
        yield Part("NumPy", 10, self._numpy)
        yield Part("Packages", 5, packages.check_packages)
        yield Part("Variables", 5, variables.check)
        yield Part("Processor", 5, machine.check_processor)
        yield Part("Memory", 5, machine.check_memory)
        yield Part("Shared memory", 5, machine.check_shared_memory)
        yield Part("GPUs", 10, mxnet_build.check_gpus)
        yield Part("MXNet", 20, self._mxnet)
        yield Part("Training", 30, self._training)
        for engine, launcher in ENGINES.items():
            limit = trials.limit(engine)
            yield Part(launcher.library, limit, self._engine(engine))
            if self.hosts and not self.missing:
                yield Part(f"{launcher.library}{_BETWEEN_HOSTS}", limit, self._engine(engine, self.hosts))

    def _numpy(self, probes):
        section = packages.check_numpy(probes)
        self.missing = section if section.verdict in (FAILED, INCONCLUSIVE) else None
        return section

    def _mxnet(self, probes):
        if self.missing:
            return Section("MXNet", {}, [self._not_tried(FAILED)])
        section, answer = mxnet_build.check_mxnet(probes)
        self.missing = None if "version" in answer.found else section
        return section

    def _training(self, probes):
        if self.missing:
            self.trains = False if self.missing.verdict == FAILED else None
            return Section("Training", {}, [self._not_tried(FAILED)])
        section, self.trains = trials.check_training(probes)
        return section

    def _engine(self, engine, hosts=None):
        obstacle = self._not_tried(WARNING) if self.missing else None
        return lambda probes: trials.check(probes, engine, hosts, self.rsh, obstacle)

    def _not_tried(self, verdict):
        assert self.missing is not None
        if self.missing.verdict == INCONCLUSIVE:
            return Finding(INCONCLUSIVE, f"Not tried: {self.missing.name} did not import in time.", MORE_TIME)
        return Finding(verdict, f"Not tried: {self.missing.name} does not import.", f"see {self.missing.name} above")


def make(part: Part, end: float, slower: float = 1.0) -> Section:
    """A section, within its limit, multiplied by `slower`, and before `end`, whatever happens in it."""
    start = time.monotonic()
    limit = max(0.0, min(part.limit * slower, end - start))
    if limit < part.limit * slower / 2:  # what is done in a hurry would be reported as too slow
        text = "Not tried: the other sections took all of the time."
        return Section(part.name, {}, [Finding(INCONCLUSIVE, text, MORE_TIME)])
    done: list[Section] = []
    ended = threading.Event()

    def run() -> None:
        try:
            done.append(part.make(Probes(start + limit)))
        except Exception as error:  # a section that fails is a finding, and the others follow
            said = f"The doctor itself failed here: {type(error).__name__}: {error}."
            done.append(Section(part.name, {}, [Finding(FAILED, said, "report it, with this text")]))
        ended.set()

    try:
        threading.Thread(target=run, name=f"doctor {part.name}", daemon=True).start()
        until = time.monotonic() + limit + GRACE
        while not ended.wait(0.2) and time.monotonic() < until:
            pass  # Python sees a Ctrl-C that came right before a wait only after it
    except KeyboardInterrupt:
        # Not `join` and `is_alive`: before Python 3.13 a thread counts as ended once Ctrl-C has interrupted its `join`.
        until = time.monotonic() + GRACE
        while not ended.is_set() and time.monotonic() < until:  # it may start one more process
            end_all()
            ended.wait(0.1)
        raise
    if not done:
        text = f"It took longer than {limit:.0f} s, and was left alone."
        done.append(Section(part.name, {}, [Finding(INCONCLUSIVE, text, MORE_TIME)]))
    return done[0]


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
    parts, start = Sections(options.hosts, options.rsh), time.monotonic()
    now = datetime.datetime.now(datetime.timezone.utc)
    head = f"gluon_parallel {__version__}, {now:%Y-%m-%d %H:%M} UTC"
    sections = []
    try:
        for part in parts:
            if sys.stderr.isatty():
                print(f"\r{part.name + ' ...':40}", end="\r", file=sys.stderr, flush=True)
            sections.append(make(part, start + options.timeout, options.timeout / TIMEOUT))
    finally:
        end_all()
    works = parts.trains
    if works and parts.hosts:
        works = _exchanged([section for section in sections if section.name.endswith(_BETWEEN_HOSTS)])
    if options.json:
        found = {"report": head, "training_works": works, "sections": [report.as_json(section) for section in sections]}
        print(json.dumps(json.loads(json.dumps(found), parse_constant=str), indent=1))  # NaN is no JSON
    else:
        worst_first = sorted(sections, key=lambda section: VERDICTS.index(section.verdict), reverse=True)
        print("\n".join([head, *_summary(sections, works), "", *map(report.text, worst_first)]))
    return 0 if works and not any(section.verdict == FAILED for section in sections) else 1


def _exchanged(sections: list[Section]) -> Optional[bool]:
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
