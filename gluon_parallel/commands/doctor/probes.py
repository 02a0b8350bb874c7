"""Probe runner of the doctor: each probe is a process with a limit of time, so a crash or a hang ends there."""

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ...forks import signals_handled
from ...launch_engines import python_path
from .report import FAILED, INCONCLUSIVE, MORE_TIME, Finding

SCRIPTS = Path(__file__).resolve().with_name("scripts.py")
PACKAGE = SCRIPTS.parents[2]  # the folder gluon_parallel
_EXCEPTION = re.compile(
    r"^ *(?:gluon_parallel\.errors\.\w+: |(?=(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt): ))", re.MULTILINE
)
_LAUNCHER = re.compile(r"^gluon-parallel \w+: (?:error: )?", re.MULTILINE)
_AFTER = re.compile(r"\s*$|gluon-parallel |[\w ,]* cannot go on")  # lines behind an error
_ORIGINAL = re.compile(r"^Original error was: (.*)$", re.MULTILINE)  # the cause, at the end of NumPy's import error
# What MXNet says of an environment variable, often in a thread that ends the process
_VARIABLE = re.compile(r"Invalid Parameter format for (\w+) expect .* but value='(.*)'|Cannot find Engine (\S+)")
_LATE = re.compile(r"(?:within|for|waited) [\d.]+ s\b")  # of the launcher's and the stores' timeouts
MARK = "@doctor "  # begins a line of JSON with facts; `scripts.py`, which runs without the package, repeats it


class Answer(NamedTuple):
    """Result of a probe's process, or the part that it came to."""

    found: dict[str, Any]
    status: Optional[int]  # of its exit; -N: signal N killed it; None: timeout
    output: str  # all that it wrote, without the lines of facts

    @property
    def error(self) -> str:
        """Why it did not end well, in one sentence without a full stop; empty if it did."""
        if self.status == 0:
            return ""
        if variable := _VARIABLE.search(self.output):
            return f"MXNet cannot read {variable[1] or 'MXNET_ENGINE_TYPE'}={variable[2] or variable[3]!r}"
        if self.status is None:
            return "it took longer than its limit of time"
        if self.status < 0:
            return f"the process was killed by {signal.Signals(-self.status).name}"
        return reason(self.output) or f"the process ended with status {self.status}"

    @property
    def is_late(self) -> bool:
        """Whether a timeout ended it, which on a slow machine says nothing."""
        return self.status is None or self.status > 0 and bool(_LATE.search(self.error))

    def finding(self, text: str, cure: str) -> Finding:
        """The finding of a process that failed: inconclusive after a timeout."""
        return Finding(INCONCLUSIVE, text, MORE_TIME) if self.is_late else Finding(FAILED, text, cure)


def reason(output: str) -> str:
    """The error in the output of a process that failed: the last exception, the launcher's message or the last line.

    Example:
        >>> reason("Traceback:\\n  raise E\\ngluon_parallel.errors.StoreUnavailable: MPI does not start:\\nno file.\\n")
        'MPI does not start: no file'
    """
    if causes := _ORIGINAL.findall(output):
        return causes[-1].rstrip(".")
    if found := list(_EXCEPTION.finditer(output)) or list(_LAUNCHER.finditer(output)):
        rest = output[found[-1].end() :].lstrip("\n").splitlines()
        lines = list(itertools.takewhile(lambda line: not _AFTER.match(line), rest))
    else:
        lines = [line for line in output.splitlines() if line.strip()][-1:]
    return " ".join(line.strip() for line in lines).partition("; its log is ")[0].rstrip(".")


class Probes(NamedTuple):
    """Runs processes until a common deadline. Each may take half of the time that is left, for others follow."""

    deadline: float  # as of ``time.monotonic``
    python: str = sys.executable
    environment: Mapping[str, str] = os.environ

    def ask(self, function: str, *arguments: object) -> Answer:
        """Run a function of ``scripts.py`` in a process."""
        return self.run([self.python, str(SCRIPTS), function, *map(str, arguments)])

    def launch(self, engine: str, function: str, options: Sequence[str]) -> Answer:
        """Run a function of ``scripts.py`` in several processes; the facts are those of rank 0."""
        limit = max(1.0, self._limit() - 1)  # before the end, so that the launcher names the late process
        with tempfile.TemporaryDirectory() as folder:
            command = [self.python, "-m", "gluon_parallel", "launch", "--engine", engine, "--timeout", f"{limit:.1f}"]
            command += ["--quiet", "--logs", folder, *options, str(SCRIPTS), function]
            done = self.run(command)
            log = Path(folder) / "rank-0.log"
            found = _parts(log.read_text(encoding="utf-8", errors="replace"))[0] if log.exists() else {}
        return done._replace(found=found)

    def run(self, command: Sequence[str]) -> Answer:
        """Run a command; when its time is over, all processes of its session are ended."""
        environment = {**self.environment, "PYTHONPATH": python_path(self.environment)}
        process, status = None, None
        with tempfile.TemporaryFile() as output:
            try:
                with _interrupts_held_back():
                    process = subprocess.Popen(
                        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )  # fmt: skip
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(self._limit())
            except OSError as error:
                return Answer({}, 127, f"{command[0]}: {error.strerror}")
            finally:
                if process is not None and status is None:  # it took too long, or Ctrl-C came
                    _end(process)
            output.seek(0)
            found, rest = _parts(output.read().decode(errors="replace"))
        return Answer(found, status, rest)

    def _limit(self) -> float:
        return max(0.0, self.deadline - time.monotonic()) / 2


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Raise KeyboardInterrupt only behind the block, so that no process is started that nobody knows of."""
    came: list[int] = []
    with signals_handled({signal.SIGINT: lambda number, _: came.append(number)}):
        yield
    if came:
        raise KeyboardInterrupt


def _end(process: subprocess.Popen) -> None:
    """End a session: SIGTERM, 2 s in which the launcher ends its processes on other hosts as well, then SIGKILL."""
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _parts(text: str) -> tuple[dict[str, Any], str]:
    """The facts in a process's output, and the other lines."""
    found: dict[str, Any] = {}
    rest = []
    for line in text.splitlines():
        if not line.startswith(MARK):
            rest.append(line)
            continue
        with contextlib.suppress(ValueError):  # the process was killed while it wrote this line
            found.update(json.loads(line.removeprefix(MARK)))
    return found, "\n".join(rest)
