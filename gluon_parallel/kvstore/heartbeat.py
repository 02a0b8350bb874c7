"""Heartbeat to the launcher: a process reports how far it has come; without a launcher nothing happens."""

import contextlib
import os

LOST_ANOTHER = "lost another"  # is sent by a process that ends because another one has
SAYS = "says "  # begins what the launcher writes into the logs of all processes
GOES_ON = "goes on"  # is sent by a process that from now on goes on without others that are lost
WAITS_FOR = "waits for "  # is sent, with their numbers, by a process that waits in vain for others
_VARIABLE = "GLUON_PARALLEL_HEARTBEAT"  # number and inode of an open pipe, which the launcher's agent reads


def send(text: str) -> None:
    """Send one line to the launcher, if there is one.

    ``send("arrived")`` says that this process is about to wait for all others to connect: from then on the launcher
    knows which process to name if one never comes.
    """
    if is_heard():
        with contextlib.suppress(OSError):
            os.write(int(os.environ[_VARIABLE].partition(":")[0]), text.encode() + b"\n")


def is_heard() -> bool:
    """Whether a launcher has started this process."""
    number, _, inode = os.environ.get(_VARIABLE, "").partition(":")
    with contextlib.suppress(OSError):
        # A process that this one started inherits the variable but not the pipe; the number may be another file's.
        return bool(number) and os.fstat(int(number)).st_ino == int(inode)
    return False
