"""Probes: each tries one thing in a process of its own, so that a crash or a hang ends there."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ....launch_engines import python_path
from ..report import FAILED, INCONCLUSIVE, MORE_TIME, Finding

SCRIPTS = Path(__file__).resolve().with_name("scripts.py")
PACKAGE = SCRIPTS.parents[3]  # the folder gluon_parallel
_EXCEPTION = re.compile(
    r"^ *(?:gluon_parallel\.errors\.\w+: |(?=(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt): ))", re.MULTILINE
)
_LAUNCHER = re.compile(r"^gluon-parallel \w+: (?:error: )?", re.MULTILINE)
_AFTER = re.compile(r"\s*$|gluon-parallel |[\w ,]* cannot go on")  # lines that no longer belong to an error
_ORIGINAL = re.compile(r"^Original error was: (.*)$", re.MULTILINE)  # the last words of NumPy's page of advice
_LATE = re.compile(r"(?:within|for|waited) [\d.]+ s\b")  # how the launcher and the stores tell of a limit
MARK = "@doctor "  # begins a line that holds a part of the answer, in JSON

_running: list[subprocess.Popen] = []


class Answer(NamedTuple):
    """What a process found out, as far as it came."""

    found: dict[str, Any]
    status: Optional[int]  # of its exit; negative: the signal that killed it; None: its time was over
    output: str  # all that it wrote, without the answer

    @property
    def error(self) -> str:
        """Why it did not end well, in one sentence without a full stop; empty if it did."""
        if self.status == 0:
            return ""
        if self.status is None:
            return "it took longer than the time that it has here"
        if self.status < 0:
            return f"the process was killed by {signal.Signals(-self.status).name}"
        return reason(self.output) or f"the process ended with status {self.status}"

    @property
    def is_late(self) -> bool:
        """Whether a limit of time ended it, which on a slow machine says nothing."""
        return self.status is None or self.status > 0 and bool(_LATE.search(self.error))

    def finding(self, text: str, cure: str) -> Finding:
        """What it means that it did not end well: inconclusive where only its time was over."""
        return Finding(INCONCLUSIVE, text, MORE_TIME) if self.is_late else Finding(FAILED, text, cure)


def reason(output: str) -> str:
    """What a process that failed says about it: the last exception, or what the launcher says, or the last line.

    Example:
        >>> reason("Traceback:\\n  raise E\\ngluon_parallel.errors.StoreUnavailable: MPI does not start:\\nno file.\\n")
        'MPI does not start: no file'
        >>> reason("ImportError: \\n\\nA page of advice.\\n\\nOriginal error was: libopenblas.so: no such file\\n")
        'libopenblas.so: no such file'
    """
    advised = _ORIGINAL.findall(output)
    found = list(_EXCEPTION.finditer(output)) or list(_LAUNCHER.finditer(output))
    if advised:
        return advised[-1].rstrip(".")
    if not found:
        lines = [line for line in output.splitlines() if line.strip()][-1:]
    else:
        rest = output[found[-1].end() :].lstrip("\n").splitlines()
        lines = list(itertools.takewhile(lambda line: not _AFTER.match(line), rest))
    return " ".join(line.strip() for line in lines).partition("; its log is ")[0].rstrip(".")


class Probes(NamedTuple):
    """Starts processes, which have until a certain moment."""

    end: float  # as of ``time.monotonic``
    python: str = sys.executable
    environment: Mapping[str, str] = os.environ

    def ask(self, function: str, *arguments: object) -> Answer:
        """Run a function of ``scripts.py``."""
        return self.run([self.python, str(SCRIPTS), function, *map(str, arguments)])

    def launch(self, engine: str, function: str, options: Sequence[str]) -> Answer:
        """The same in several processes; the answer is that of rank 0."""
        limit = max(1.0, self.end - time.monotonic() - 1)  # so that the launcher itself can say who is late
        with tempfile.TemporaryDirectory() as folder:
            command = [self.python, "-m", "gluon_parallel", "launch", "--engine", engine, "--timeout", f"{limit:.1f}"]
            command += ["--quiet", "--logs", folder, *options, str(SCRIPTS), function]
            done = self.run(command)
            log = Path(folder) / "rank-0.log"
            found = _parts(log.read_text(encoding="utf-8", errors="replace"))[0] if log.exists() else {}
        return done._replace(found=found)

    def run(self, command: Sequence[str]) -> Answer:
        """Run a command until it ends, or its time is over: then everything that it started is killed."""
        environment = {**self.environment, "PYTHONPATH": python_path(self.environment)}
        with tempfile.TemporaryFile() as output:
            try:
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                return Answer({}, 127, f"{command[0]}: {error.strerror}")
            _running.append(process)
            status: Optional[int] = None
            try:
                status = process.wait(max(0.0, self.end - time.monotonic()))
            except subprocess.TimeoutExpired:
                _end(process)
            _running.remove(process)
            output.seek(0)
            found, rest = _parts(output.read().decode(errors="replace"))
        return Answer(found, status, rest)


def end_all() -> None:
    """End what is still running, when nobody waits for its answer any more."""
    for process in list(_running):
        _end(process)


def _end(process: subprocess.Popen) -> None:
    """End a session: the launcher gets a moment, in which it ends its processes on other hosts as well."""
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _parts(text: str) -> tuple[dict[str, Any], str]:
    """The answer that is in a process's output, and the rest."""
    found: dict[str, Any] = {}
    rest = []
    for line in text.splitlines():
        try:
            found.update(json.loads(line[len(MARK) :]) if line.startswith(MARK) else {})
        except ValueError:  # the process was killed while it wrote this line
            pass
        if not line.startswith(MARK):
            rest.append(line)
    return found, "\n".join(rest)
