"""Members: what the launcher knows of each process of a group, and of its loss or failure."""

import contextlib
import signal
from typing import NamedTuple, Optional

from ..launch_engines import agent


class Member:
    """What is known of one process of the group."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_worker = name.startswith("rank ")
        self.connection: Optional[agent.Connection] = None
        self.host = self.address = ""
        self.process = 0
        self.heard = 0.0  # when its agent spoke last
        self.stopped_since: Optional[float] = None
        self.arrived: Optional[float] = None
        self.signalled: Optional[tuple[float, int]] = None
        self.records = False  # whether it writes what it exchanged last when SIGUSR1 comes
        self.is_lost = False  # and the others go on
        self.lost_another = False  # it says that it ends because another one has
        self.was_done = False  # it says so of its own work
        self.goes_on = False  # it says that it goes on without others that are lost
        self.waits_for: set[str] = set()  # the names of members that it says it waits for in vain
        self.return_code: Optional[int] = None
        self.failed_at: Optional[float] = None  # when it ended so, until the other one has ended
        self.gone = False

    def __str__(self) -> str:
        where = f"process {self.process} on {self.host}" if self.process else "not started"
        return f"{self.name} ({where})"


class Loss(NamedTuple):
    """A process that was lost, before all others are known to go on without it."""

    member: Member
    message: str
    exit_code: int
    since: float


class Failure(NamedTuple):
    """What ended a group: which process, what happened to it, and the status for the shell."""

    member: str
    message: str
    exit_code: int


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
