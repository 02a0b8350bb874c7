"""Logs of the processes: a file for each, and a live view with the process's name before every line."""

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional, TextIO

from ..archive import writable
from ..training import run
from .worker import LOG_ONLY

_TAIL = 1 << 14  # bytes at the end of a log in which its last lines are looked for


def make_folder(folder: Optional[str]) -> Path:
    """The folder for the logs: the one named, or else a new one, ``runs/launch/<number>``."""
    if folder is None:
        return run.number(Path("runs/launch"), "--logs FOLDER").resolve()
    with writable(f"the folder {folder}", "Choose another: --logs FOLDER"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder).resolve()


class Logs:
    """The files ``rank-0.log``, ``server-0.log``, ... in a folder, which are continued, and the terminal.

    The terminal gets what the launcher says, if it `announces`, and what the processes say, if the view is `live`.
    What the system refuses to write ends nothing: it is said once, and the next line is tried again.
    """

    def __init__(self, folder: Path, live: bool = True, announces: bool = True) -> None:
        self.folder, self.live, self.announces = folder, live, announces
        self._files: dict[str, io.FileIO] = {}
        self._refused: set[str] = set()  # what could not be written, and has been named
        self._bar = ""  # how far a process is, below the lines on a terminal

    def path(self, member: str) -> Path:
        return self.folder / f"{member.replace(' ', '-')}.log"

    def open(self, member: str) -> io.FileIO:
        """The file of a member; OutputUnavailable: it cannot be opened."""
        if member not in self._files:
            with writable(f"the log {self.path(member)}", "Free space there, or choose another folder: --logs FOLDER"):
                # Without a buffer, which would keep what it cannot write and fail with it again when it is closed
                self._files[member] = io.FileIO(self.path(member), "a")
        return self._files[member]

    def write(self, member: str, lines: Sequence[str], stream: int = 1, unseen: Optional[str] = None) -> None:
        """Lines of a process's standard output (1) or error (2); the live view leaves out those that begin `unseen`.

        It also leaves out those that begin with ``LOG_ONLY``, which is taken away in the log. Bytes that are no UTF-8
        stand in the lines as ``surrogateescape`` decodes them.
        """
        self._keep(member, [line.removeprefix(LOG_ONLY) for line in lines])
        if self.live:
            prefix, left_out = f"[{_short(member)}] ", (LOG_ONLY, *([unseen] if unseen else []))
            self._show([prefix + line for line in lines if not line.startswith(left_out)], stream)

    def say(self, text: str, members: Sequence[str] = ()) -> None:
        """A line of the launcher's own, also into the logs of some members."""
        lines = [f"gluon-parallel launch: {text}"]
        if self.announces:
            self._show(lines, 2)
        for member in members:
            self._keep(member, lines)

    def show_bar(self, member: str, text: str) -> None:
        """Show how far a process is, until it has nothing to show; on a terminal alone."""
        if self.live and sys.stderr is not None and sys.stderr.isatty():
            self._erase_bar()
            width = shutil.get_terminal_size().columns - 1
            self._bar = f"[{_short(member)}] {text}"[:width] if text else ""
            self._draw_bar()

    def _draw_bar(self) -> None:
        if self._bar:
            with contextlib.suppress(OSError, ValueError):  # its lines say what cannot be written
                _print(self._bar, sys.stderr)

    def _erase_bar(self) -> None:
        if self._bar:
            with contextlib.suppress(OSError, ValueError):
                _print("\r" + " " * len(self._bar) + "\r", sys.stderr)

    def _keep(self, member: str, lines: Sequence[str]) -> None:
        try:
            _write(self.open(member).fileno(), _text(lines).encode("utf-8", "surrogateescape"))
        except OSError as error:
            self._complain(str(self.path(member)), error, "what is written meanwhile is missing in it")

    def _show(self, lines: Sequence[str], stream: int) -> None:
        file, name = (sys.stdout, "standard output") if stream == 1 else (sys.stderr, "standard error")
        if file is None:  # it was closed when Python began
            return
        self._erase_bar()
        try:
            _print(_text(lines), file)
            self._draw_bar()
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self._complain(name, error, f"the logs in {self.folder} have what it would have shown")

    def _complain(self, what: str, error: Exception, effect: str) -> None:
        if what not in self._refused:
            self._refused.add(what)
            self.say(f"{what} cannot be written: {getattr(error, 'strerror', None) or error}; {effect}")

    def tail(self, member: str) -> str:
        """The last 12 lines of a member's log, indented; "" if it said nothing, or its log cannot be read."""
        text = b""
        with contextlib.suppress(OSError), open(self.path(member), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            text = file.read()
        return "".join(f"\n    {line}" for line in text.decode("utf-8", "replace").splitlines()[-12:])

    def close(self) -> None:
        self._erase_bar()
        for member, file in self._files.items():
            try:
                file.close()
            except OSError as error:  # some file systems write only now
                self._complain(str(self.path(member)), error, "its end is missing")


def _short(member: str) -> str:
    return member.replace("rank ", "")


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _print(text: str, file: TextIO) -> None:
    """Print at once; to a file of the system without its buffer, which would fail again at the program's end."""
    encoding = file.encoding or "utf-8"
    text = shown(text, encoding)
    file.flush()
    if file in (sys.__stdout__, sys.__stderr__):
        _write(file.fileno(), text.encode(encoding))
    else:  # a notebook's, or another one that was put into its place
        file.write(text)
        file.flush()


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def shown(text: str, encoding: str) -> str:
    """A text as a file of an encoding can show it: bytes that are no UTF-8 are in that encoding, or are escaped.

    Example:
        >>> name = b"caf\\xe9".decode("utf-8", "surrogateescape")
        >>> shown(name, "latin-1"), shown(name, "utf-8"), shown("caf\\u0113", "latin-1")
        ('café', 'caf\\\\xe9', 'caf\\\\u0113')
    """
    with contextlib.suppress(UnicodeError):
        return text.encode(encoding, "surrogateescape").decode(encoding)
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return text.encode(encoding, "backslashreplace").decode(encoding)
