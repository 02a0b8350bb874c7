"""List of hosts that is watched: a file, or what a script prints."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Callable, Optional

from ..errors import LaunchError
from ..launch_engines import hosts

_PAUSE = 2.0  # seconds between two looks at the list
_LIMIT = 10.0  # seconds in which a script prints it


def ask(script: str) -> list[hosts.Host]:
    """The hosts that a script prints; LaunchError: it prints none, with what it says instead."""
    where = f"--host-discovery-script {script}"
    try:
        running = _Running(script)
    except OSError as error:
        raise LaunchError(f"{where}: it does not start: {error}") from error
    running.wait()
    status, said = running.end()
    if status != 0:
        raise LaunchError(f"{where}: {_wrong(status, said)}")
    return hosts.read_text(said, where)


class _Running:
    """A script that runs, in a process group of its own, and writes into a file."""

    def __init__(self, script: str) -> None:
        with contextlib.ExitStack() as if_it_fails:
            # A pipe would stay open in what the script has left behind.
            self._output = if_it_fails.enter_context(tempfile.TemporaryFile())
            self.process = subprocess.Popen(
                [script], stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            if_it_fails.pop_all()

    def wait(self) -> None:
        """Until it has ended, or for the time that it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_LIMIT)

    def end(self) -> tuple[Optional[int], str]:
        """End it, and what it has started; returns its status, None if it was at work still, and what it has said."""
        status = self.process.poll()
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with self._output:
            self._output.seek(0)
            return status, self._output.read().decode(errors="replace")


def _wrong(status: Optional[int], said: str) -> str:
    how = f"printed nothing within {_LIMIT:g} s" if status is None else f"ended with status {status}"
    return f"it {how}. It said: {said[-500:].strip() or 'nothing'}"


class HostList:
    """The hosts that shall have processes, and how many; asked again and again.

    Args:
        file: a hostfile; None where there is a script.
        script: a program that prints lines as a hostfile has them.
        say: called with a line for people; the same complaint is made once in a row.
        takes_others: whether other hosts than this machine find the launcher.

    Attributes:
        hosts: None before the first good look.
    """

    def __init__(
        self, file: Optional[str], script: Optional[str], say: Callable[[str], None], takes_others: bool = True
    ) -> None:
        self._file, self._script, self._say, self._takes_others = file, script, say, takes_others
        self._running: Optional[_Running] = None
        self._next = self._since = 0.0
        self._before: Optional[str] = None  # the text of the last look
        self._complaint = ""
        self.hosts: Optional[list[hosts.Host]] = None

    def look(self, now: float) -> None:
        """Read the list, if it is time to."""
        if self._running is not None:
            self._look_at_script(self._running, now)
        elif now >= self._next:
            self._next = now + _PAUSE
            if self._script is None:
                self._read_file()
            else:
                self._start_script(self._script, now)

    def look_at_once(self) -> None:
        """Read the list now, and wait for the script; the next look begins with a new clock."""
        self.close()
        self._next = 0.0
        self.look(0.0)
        if self._running is not None:
            self._running.wait()
            self._look_at_script(self._running, math.inf)

    def close(self) -> None:
        """End the script, if it runs."""
        if self._running is not None:
            self._running.end()
            self._running = None

    def _read_file(self) -> None:
        try:
            self._take(Path(str(self._file)).read_text(encoding="utf-8"), f"hostfile {self._file}")
        except (OSError, UnicodeDecodeError) as error:
            self._complain(f"hostfile {self._file}: cannot be read: {error}")

    def _start_script(self, script: str, now: float) -> None:
        try:
            self._running = _Running(script)
            self._since = now
        except OSError as error:
            self._complain(f"--host-discovery-script {script}: it does not start: {error}")

    def _look_at_script(self, running: _Running, now: float) -> None:
        if running.process.poll() is None and now - self._since < _LIMIT:
            return
        (status, said), self._running = running.end(), None
        where = f"--host-discovery-script {self._script}"
        if status != 0:
            self._complain(f"{where}: {_wrong(status, said)}")
        else:
            self._take(said, where)

    def _take(self, text: str, where: str) -> None:
        if text == self._before:
            return
        self._before = text
        try:
            found = hosts.read_text(text, where)
        except LaunchError as error:
            self._complain(str(error))
            return
        others = [] if self._takes_others else [host.name for host in found if not hosts.is_local(host.name)]
        if others:
            self._complain(
                f"{where}: the launch has begun on this machine alone, where {', '.join(others)} cannot reach it. "
                "Start it with a list that names this machine by its address in the network, or another host"
            )
        if len(others) < len(found):
            self.hosts = [host for host in found if host.name not in others]
        self._complaint = "" if not others else self._complaint

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            self._before = None  # so that the same list ends the complaint when it can be read again
            self._say(f"{text}. The processes stay as they are")
