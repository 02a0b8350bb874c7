"""Request to stop a training by Ctrl-C, SIGTERM or SIGHUP, which waits for the end of a step and a checkpoint."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any, Callable, Optional

from ..forks import signals_handled
from ..kvstore import heartbeat
from ..kvstore.background_sum import BackgroundSum
from ..kvstore.reserved_keys import STOP
from .worker_pools import SIGNALS, left_to_this_process

_signal: Optional[int] = None


class Stopped(SystemExit):
    """Training was asked to stop, and a checkpoint was written; `code` is the exit code that the shell expects."""

    code: int


def requested() -> Optional[int]:
    """The first signal that has come to this process since its last :func:`postponed`; None: none has."""
    return _signal


class AgreedStop:
    """All processes of a store hear, one step later, which signal has asked one of them to stop; nobody waits."""

    def __init__(self, store: Any) -> None:
        self._sum = BackgroundSum(store, STOP, len(SIGNALS))
        self._pending: Any = None  # an array that becomes how many had each signal at the last call

    def asked(self, here: Optional[int]) -> Optional[int]:
        """The signal that a process had at the last call; `here`: the one that this process has by now."""
        if self._pending is not None:
            for number, count in zip(SIGNALS, self._sum.read(self._pending)):
                if count:
                    return number
        self._pending = self._sum.sum([number == here for number in SIGNALS])
        return None


@contextlib.contextmanager
def postponed(is_main: Callable[[], bool], only_main: bool = False) -> Iterator[None]:
    """Within this block, :data:`SIGNALS` are noted; Ctrl-C after one of them raises KeyboardInterrupt, if not launched.

    With `only_main`, process 0 (`is_main`) alone stops: SIGTERM to another one is its loss, unless the launcher asks
    all to stop; without a launcher, it ends at once.
    """
    global _signal
    _signal = None

    def note(number: int, _frame: Any) -> None:
        global _signal
        if only_main and number != signal.SIGINT and not is_main() and not heartbeat.is_heard():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if _signal is not None:
            # The launcher passes on a signal that may have come to all; a second Ctrl-C is the launcher's.
            if is_main() and number == signal.SIGINT and not heartbeat.is_heard():
                raise KeyboardInterrupt
            return
        _signal = number
        heartbeat.send(f"{heartbeat.ASKED}{number}")
        if is_main():  # not print(): the signal may have come in the middle of one, and a second one is refused then
            hint = b"; Ctrl-C once more stops at once" if number == signal.SIGINT else b""
            with contextlib.suppress(OSError):  # SIGHUP: the terminal is gone
                os.write(2, b"\nStopping after this step" + hint + b".\n")

    with left_to_this_process(), signals_handled(dict.fromkeys(SIGNALS, note)):
        yield
