"""Members: what the launcher knows of each process of a group, and of its loss or failure."""

import contextlib
import signal
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

from .. import launcher


class Member:
    """What is known of one process of the group."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_worker = name.startswith("rank ")
        self.has_come = False  # its agent has connected
        self.has_stub = True  # mpirun has started what stands for it; where that is used
        self.stub_is_gone = False  # and that has ended
        self.start_status: Optional[int] = None  # of the command that was to start its agent, once it has ended
        self.not_started = ""  # why there is no such command, in words
        self.is_cut_off = False  # nothing comes from its agent any more
        self.host = self.address = ""
        self.process = 0
        self.heard = 0.0  # when its agent spoke last
        self.stopped_since: Optional[float] = None
        self.arrived: Optional[float] = None
        self.signalled: Optional[tuple[float, int]] = None
        self.records = False  # whether it writes what it exchanged last when SIGUSR1 comes
        self.is_lost = False  # and the others go on
        self.is_new = False  # it has not joined the others yet
        self.left_out = False  # the others say that they go on without it
        self.lost_another = False  # it says that it ends because another one has
        self.was_done = False  # it says so of its own work
        self.goes_on = False  # it says that it goes on without others that are lost
        self.waits_for: set[str] = set()  # the names of members that it says it waits for in vain
        self.return_code: Optional[int] = None
        self.failed_at: Optional[float] = None  # when it ended so, until the other one has ended
        self.gone = False

    def hear(self, message: Mapping[str, Any], now: float) -> None:
        """Note what its agent says, or its process through the agent."""
        self.heard = now
        text = message.get("report", "")
        if "started" in message:
            self.process = message["started"]
        elif "beat" in message:
            self.stopped_since = (self.stopped_since or now) if message["beat"] == "T" else None
        elif "signalled" in message:
            self.signalled = (now, message["signalled"])
        elif "exited" in message:
            self.return_code = message["exited"]
        elif "ended" in message:
            self.gone = True
        elif text == launcher.ARRIVED:
            self.arrived = now if self.arrived is None else self.arrived
        elif text == launcher.LISTENS:
            self.records = True
        elif text in (launcher.LOST_ANOTHER, launcher.WAS_DONE):
            self.lost_another, self.was_done = True, text == launcher.WAS_DONE
        elif text == launcher.GOES_ON:
            self.goes_on = True
        elif text.startswith(launcher.WAITS_FOR):
            self.waits_for = {f"rank {number}" for number in text.removeprefix(launcher.WAITS_FOR).split()}
        elif text.startswith(launcher.ASKED):
            self.signalled = self.signalled or (now, int(text.rpartition(" ")[2]))

    def __str__(self) -> str:
        where = f"process {self.process} on {self.host}" if self.process else "not started"
        return f"{self.name} ({where})"


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
