"""Logs of the processes: a file for each, and a live view with the process's name before every line."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Optional

from ..archive import writable
from ..training import run


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
    """

    def __init__(self, folder: Path, live: bool = True, announces: bool = True) -> None:
        self.folder, self.live, self.announces = folder, live, announces
        self._files: dict[str, IO[str]] = {}

    def path(self, member: str) -> Path:
        return self.folder / f"{member.replace(' ', '-')}.log"

    def write(self, member: str, lines: Sequence[str], stream: int = 1, unseen: Optional[str] = None) -> None:
        """Lines of a process's standard output (1) or error (2); the live view leaves out those that begin `unseen`."""
        self._print(lines, self._file(member))
        if self.live:
            prefix = f"[{member.replace('rank ', '')}] "
            shown = [prefix + line for line in lines if unseen is None or not line.startswith(unseen)]
            self._print(shown, sys.stdout if stream == 1 else sys.stderr)

    def say(self, text: str, members: Sequence[str] = ()) -> None:
        """A line of the launcher's own, also into the logs of some members."""
        if self.announces:
            self._print([f"gluon-parallel launch: {text}"], sys.stderr)
        for member in members:
            self._print([f"gluon-parallel launch: {text}"], self._file(member))

    def _print(self, lines: Sequence[str], stream: IO[str]) -> None:
        stream.write("".join(f"{line}\n" for line in lines))
        stream.flush()

    def _file(self, member: str) -> IO[str]:
        if member not in self._files:
            self._files[member] = open(self.path(member), "a", encoding="utf-8")
        return self._files[member]

    def tail(self, member: str) -> str:
        """The last 12 lines of a member's log, indented; "" if it said nothing."""
        if not self.path(member).exists():
            return ""
        lines = self.path(member).read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        return "".join(f"\n    {line}" for line in lines)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
