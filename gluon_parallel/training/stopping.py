"""Request to stop a training by Ctrl-C, SIGTERM or SIGHUP, which waits for the end of a step and a checkpoint."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any, Callable, Optional

from .. import launcher
from ..forks import SIGNALS, signals_handled
from ..kvstore.reserved_keys import STOP
from ..mxnet.trainers import has_made_store
from ..reduce.step_header import StepHeader, header_of
from .worker_pools import left_to_this_process

_signal: Optional[int] = None


class Stopped(SystemExit):
    """Training was asked to stop, and a checkpoint was written; `code` is the exit code that the shell expects."""

    code: int


def requested() -> Optional[int]:
    """The first signal that has come to this process since its last :func:`postponed`; None: none has."""
    return _signal


class AgreedStop:
    """All processes of a store hear, one step later, which signal has asked one of them to stop.

    The header of the step tells it; without a trainer, or between two calls without a step, one that says nothing else.
    """

    def __init__(self, store: Any, trainer: Any) -> None:
        self._store, self._trainer = store, trainer
        self._own = StepHeader(store, key=STOP) if trainer is None else None
        self._num_seen = 0  # headers that were sent before the last call

    def asked(self, here: Optional[int]) -> Optional[int]:
        """The signal that a process had at the last call; `here`: the one that this process has by now."""
        header = self._header()
        if header is None:
            return None
        if header.num_sent:
            for number, count in zip(SIGNALS, header.read()["stop"]):
                if count:
                    return number
        header.own["stop"] = [number == here for number in SIGNALS]
        if header.num_sent == self._num_seen and (header.num_sent or self._own is not None):
            header.send()
        self._num_seen = header.num_sent
        return None

    def _header(self) -> Optional[StepHeader]:
        """That of the trainer, if it has made its first step."""
        if self._own is not None or not has_made_store(self._trainer):
            return self._own
        return header_of(self._trainer)


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
        if only_main and number != signal.SIGINT and not is_main() and not launcher.is_heard():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if _signal is not None:
            # The launcher passes on a signal that may have come to all; a second Ctrl-C is the launcher's.
            if is_main() and number == signal.SIGINT and not launcher.is_heard():
                raise KeyboardInterrupt
            return
        _signal = number
        launcher.send(f"{launcher.ASKED}{number}")
        if is_main():  # not print(): the signal may have come in the middle of one, and a second one is refused then
            hint = b"; Ctrl-C once more stops at once" if number == signal.SIGINT else b""
            with contextlib.suppress(OSError):  # SIGHUP: the terminal is gone
                os.write(2, b"\nStopping after this step" + hint + b".\n")

    with left_to_this_process(), signals_handled(dict.fromkeys(SIGNALS, note)):
        yield
