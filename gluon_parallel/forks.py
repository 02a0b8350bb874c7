"""Forks: what belongs to the process that has installed it, and is undone in a fork, such as a DataLoader's worker."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import util
from typing import Any, Callable

SIGNALS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that ask a training to stop
_END = 3.0  # seconds in which what multiprocessing has begun can end

_installed: list[_Handlers] = []  # the innermost last
_thread = threading.local()  # mask: the signals that this thread, which forks, has blocked otherwise


def undo_in_forks(undo: Callable[[], object]) -> None:
    """Have `undo` called at the beginning of every fork of this process, and of its forks."""
    os.register_at_fork(after_in_child=undo)


def at_exit(function: Callable[[], object]) -> None:
    """As ``atexit.register``, but for this process alone: one that ``os.fork`` has made runs the same list."""
    process = os.getpid()
    atexit.register(lambda: function() if os.getpid() == process else None)


def end_at_once(status: int) -> None:
    """End this process past Python's way out, which may wait for others for ever; only its pools are ended first."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, broken, or closed: nobody reads it
            stream.flush()
    # They leave worker processes and a temporary folder; other libraries' finalizers may wait for something, too.
    thread = threading.Thread(target=util._run_finalizers, daemon=True)  # type: ignore[attr-defined]
    try:
        thread.start()
    except RuntimeError:  # since Python 3.12 none starts in a function of atexit, which runs in the main thread
        signal.signal(signal.SIGALRM, lambda *_: os._exit(status))
        signal.setitimer(signal.ITIMER_REAL, _END)
        util._run_finalizers()  # type: ignore[attr-defined]
    else:
        thread.join(_END)
    os._exit(status)


@contextlib.contextmanager
def signals_handled(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Within this block, each of these signals calls its function of (number, frame) in this process.

    A signal that is ignored stays so: SIGINT in a job that a script has put into the background, SIGHUP under
    ``nohup``. Forks have the handlers that there were before.
    """
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals nowhere else
        handlers = {}
    installed = _Handlers(handlers)
    _installed.append(installed)
    try:
        yield
    finally:
        if installed in _installed:  # in a fork that leaves the block, they are removed already
            _installed.remove(installed)
            installed.remove()


class _Handlers:
    """Handlers of signals of this process, and those that they have replaced."""

    def __init__(self, handlers: Mapping[int, Any]) -> None:
        # None: a handler that Python does not know, and could not put back
        kept = (signal.SIG_IGN, None)
        self.ours = {number: ours for number, ours in handlers.items() if signal.getsignal(number) not in kept}
        self._before = {number: signal.signal(number, ours) for number, ours in self.ours.items()}

    def remove(self) -> None:
        """Put the earlier handlers back, except where a later block has put its own."""
        for number, handler in self._before.items():
            if signal.getsignal(number) is self.ours[number]:
                signal.signal(number, handler)


def _hold_signals() -> None:
    """Before a fork: one that comes to the fork waits until its handlers are undone there; Python would forget it."""
    numbers = {number for installed in _installed for number in installed.ours}
    _thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _let_signals_in() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _thread.mask)


def _begin_fork() -> None:
    while _installed:
        _installed.pop().remove()
    _let_signals_in()


os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_in)
undo_in_forks(_begin_fork)
