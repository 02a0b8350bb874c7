"""SIGUSR1 writes the flight recorder's file, also while the main thread waits inside MXNet."""

from __future__ import annotations

import functools
import os
import signal
import threading
from typing import Any

from ...errors import LOG
from .. import heartbeat
from . import report, stack
from .ring import RECORDER

LISTENS, WRITTEN = "listens to SIGUSR1", "has written"  # what the launcher is told
SAID = "gluon_parallel: SIGUSR1: "  # how the line in the log begins


def start(rank: int, size: int, progress: Any = None) -> None:
    """This process is `rank` of `size`: from now on SIGUSR1 writes its file, unless the program uses that itself.

    `progress` is its progress engine, if it has one.

    Python runs handlers in the main thread alone, and not before it comes back from MXNet, which may be never. What
    Python itself does when the signal comes, in C, is to write the signal's number to a pipe; a thread reads it.
    """
    RECORDER.rank, RECORDER.size = rank, size
    if progress is not None:
        RECORDER.progress = progress
    if size > 1 and not RECORDER.stack:
        RECORDER.stack = stack.listen()
    is_free = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    if size == 1 or not is_free or threading.current_thread() is not threading.main_thread():
        return
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(reading, True)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if before != -1:  # taken, as by asyncio: the handler must do
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
        signal.signal(signal.SIGUSR1, _handle)
    else:
        signal.signal(signal.SIGUSR1, _handle_elsewhere)
        threading.Thread(target=_read, args=(reading,), name="gluon_parallel.flight_recorder", daemon=True).start()
    signal.siginterrupt(signal.SIGUSR1, False)  # no system call of another library fails because of it
    os.register_at_fork(after_in_child=functools.partial(_leave, writing if before == -1 else None))
    heartbeat.send(LISTENS)


def _handle(*_: Any) -> None:
    _write()


def _handle_elsewhere(*_: Any) -> None:
    pass  # the thread does it


def _read(reading: int) -> None:
    while True:
        for number in os.read(reading, 64):
            if number == signal.SIGUSR1 and signal.getsignal(number) is _handle_elsewhere:  # still our handler
                _write()


def _leave(writing: int | None) -> None:
    """In a forked process, such as a DataLoader's worker: SIGUSR1, sent to all, neither ends it nor writes a file."""
    if signal.getsignal(signal.SIGUSR1) is _handle:
        signal.signal(signal.SIGUSR1, _handle_elsewhere)
    if writing is not None and (now := signal.set_wakeup_fd(-1)) != writing:
        signal.set_wakeup_fd(now)


def _write() -> None:
    written = report.write("SIGUSR1")
    if getattr(RECORDER.progress, "failure", None) is None:  # else the error of the exchanges has said so
        LOG.warning(f"{SAID}{written}")
    LOG.warning(f"{SAID}the main thread is at {stack.of_this_process()}")
    heartbeat.send(WRITTEN)
