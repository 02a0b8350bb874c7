"""Forks: what belongs to the process that has installed it, and is undone in a fork, such as a DataLoader's worker."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Callable

_is_fork = False
_installed: list[_Handlers] = []  # the innermost last


def is_fork() -> bool:
    """Whether this process is a fork of one that had imported this package."""
    return _is_fork


def undo_in_forks(undo: Callable[[], object]) -> None:
    """Have `undo` called at the beginning of every fork of this process, and of its forks."""
    os.register_at_fork(after_in_child=undo)


def at_exit(function: Callable[[], object]) -> None:
    """As ``atexit.register``, but for this process alone: one that ``os.fork`` has made runs the same list."""
    process = os.getpid()
    atexit.register(lambda: function() if os.getpid() == process else None)


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
        _installed.remove(installed)
        installed.remove()


class _Handlers:
    """Handlers of signals of this process, and those that they have replaced."""

    def __init__(self, handlers: Mapping[int, Any]) -> None:
        # None: a handler that Python does not know, and could not put back
        kept = (signal.SIG_IGN, None)
        free = [number for number in handlers if signal.getsignal(number) not in kept]
        process = os.getpid()

        def of(handler: Any) -> Any:
            def call(number: int, frame: Any) -> None:
                if os.getpid() == process:
                    handler(number, frame)
                    return
                self.remove()  # it came to a fork before this was undone there
                os.kill(os.getpid(), number)

            return call

        self._ours = {number: of(handlers[number]) for number in free}
        self._before = {number: signal.signal(number, ours) for number, ours in self._ours.items()}

    def remove(self) -> None:
        """Put the earlier handlers back, except where a later block has put its own."""
        for number, handler in self._before.items():
            if signal.getsignal(number) is self._ours[number]:
                signal.signal(number, handler)


def _begin_fork() -> None:
    global _is_fork
    _is_fork = True
    while _installed:
        _installed.pop().remove()


undo_in_forks(_begin_fork)
