"""State of one process of a group, as its launcher knows it, and how a process ended."""

import contextlib
import signal
from typing import NamedTuple, Optional

from .agent import Connection


class Failure(NamedTuple):
    """What ended a group: which process, what happened to it, and the status for the shell."""

    member: str
    message: str
    exit_code: int


class Member:
    """What is known of one process of the group."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_worker = name.startswith("rank ")
        self.connection: Optional[Connection] = None
        self.host = ""
        self.process = 0
        self.heard = 0.0  # when its agent spoke last
        self.stopped_since: Optional[float] = None
        self.arrived: Optional[float] = None
        self.signalled: Optional[tuple[float, int]] = None
        self.records = False  # whether it writes what it exchanged last when SIGUSR1 comes
        self.return_code: Optional[int] = None
        self.is_lost = False  # and the others go on
        self.gone = False

    def __str__(self) -> str:
        where = f"process {self.process} on {self.host}" if self.process else "not started"
        return f"{self.name} ({where})"


def describe(return_code: int) -> str:
    """How a process ended, in words."""
    if return_code >= 0:
        return f"ended with status {return_code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-return_code).name}"
    return f"was killed by signal {-return_code}"


def status(return_code: int) -> int:
    """A process's end as a shell counts it."""
    return return_code if return_code > 0 else 128 - return_code
