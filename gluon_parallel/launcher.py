"""Messages between this process and the launcher, one line each, through its agent."""

import contextlib
import os
import threading
from collections.abc import Collection, Sequence
from typing import Callable, Optional

ARRIVED = "arrived"  # is sent by a process that is about to wait for all others to connect
LOST_ANOTHER = "lost another"  # is sent by a process that ends because another one has
WAS_DONE = "was done"  # is sent by a process that had done its work when another one failed
GOES_ON = "goes on"  # is sent by a process that from now on goes on without others that are lost
ENDS = "ends"  # is sent by a process that knows that the programs of all have ended
WAITS_FOR = "waits for "  # is sent, with their numbers, by a process that waits in vain for others
LEFT_OUT = "goes on without "  # is sent, with the arguments of `left_out` as JSON, once others are left out for good
RAISED = "raised "  # is sent, with the error and its place, by a process that ends because of it
ASKED = "asked to stop by "  # is sent, with a signal's number, by a process that stops after its step
LISTENS, WRITTEN = "listens to SIGUSR1", "has written"  # are sent by a process with a flight recorder, see its `start`
SAID = "gluon_parallel: SIGUSR1: "  # begins the lines in the log that follow SIGUSR1
BAR = "bar "  # begins the progress that the launcher's terminal shows; nothing after it removes it
SAYS = "says "  # begins what the launcher writes into the logs of all processes
LOST = "lost "  # is heard, with a number, when the launcher has lost that process
STARTS = "starts "  # is heard, with what to start as JSON, by the process that shall start a new one
READY = "is ready to join "  # is sent, with how to meet it as JSON, by a new process
JOINS = "joins "  # is heard, with the same, by the processes that shall meet the new one
MEETS = "meets "  # is sent, with its number, by each process that begins to meet a new one
LEAVES = "leaves"  # is heard by a process that shall end after its step
JOINED = "has joined"  # is sent by a new process that has the state of the others
REFUSED = "cannot be joined by "  # is sent, with its number and why, by a process that it could not join
# Number and inode of an open socket, and the number of the process that has the other end: the launcher's agent
_VARIABLE = "GLUON_PARALLEL_REPORTS"


def send(text: str) -> None:
    """Send one line to the launcher; without a launcher nothing happens."""
    number = _socket()
    if number is not None:
        with contextlib.suppress(OSError):
            os.write(number, text.encode() + b"\n")


def left_out(
    gone: Sequence[int], step: int, in_step: bool, num_left: int, seconds: float, leaving: Collection[int] = ()
) -> str:
    """What is said of processes without which the others go on.

    Args:
        gone: their numbers.
        step: how many steps all had made.
        in_step: whether some were in the next one, which those that are asked to leave do not begin.
        num_left: how many go on.
        seconds: for which those were held.
        leaving: the numbers of those that were asked to leave; only the launcher knows them.
    """
    asked = {*gone}.intersection(leaving)
    where = f"in step {step + 1}" if in_step else f"after step {step}"
    parts = [(f"lost {where}", {*gone} - asked), (f"left after step {step}", asked)]
    said = [f"{what}: process {', '.join(map(str, sorted(some)))}" for what, some in parts if some]
    return "; ".join([*said, f"{num_left} go on after {seconds:.2f} s"])


def is_heard() -> bool:
    """Whether a launcher has started this process."""
    return _socket() is not None


_listeners: dict[str, Callable[[str], None]] = {}  # what a line begins with -> what is called with its rest


def listen(prefix: str, function: Callable[[str], None]) -> None:
    """Call ``function(rest)`` in a thread for each line of the launcher that begins with `prefix`."""
    is_first = not _listeners
    _listeners[prefix] = function
    if is_first and (number := _socket()) is not None:
        threading.Thread(target=_hear, args=(number,), name="gluon_parallel.launcher", daemon=True).start()


def _hear(number: int) -> None:
    """Hand on what the launcher sends, until its agent ends."""
    with contextlib.suppress(OSError), open(number, encoding="utf-8", closefd=False) as file:
        for line in file:
            for prefix, function in list(_listeners.items()):
                if line.startswith(prefix):
                    function(line[len(prefix) :].rstrip("\n"))


def _socket() -> Optional[int]:
    """The socket's number; None without a launcher."""
    with contextlib.suppress(OSError, ValueError):
        number, inode, agent = map(int, os.environ.get(_VARIABLE, "").split(":"))
        # A fork of this process, or a program that it starts, inherits the variable, and perhaps the socket; it is no
        # child of the agent. The number may be another file's.
        if os.getppid() == agent and os.fstat(number).st_ino == inode:
            return number
    return None
