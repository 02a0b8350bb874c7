"""Request to stop a training by Ctrl-C or SIGTERM, which waits for the end of a step and a checkpoint."""

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Callable, Optional

from ..kvstore.background_sum import BackgroundSum
from ..kvstore.reserved_keys import STOP

_signal: Optional[int] = None
_note_sigterm: Optional[Callable[[], Any]] = None  # of the block of :func:`postponed`


class Stopped(SystemExit):
    """Training was asked to stop, and a checkpoint was written; `code` is the exit code that the shell expects."""

    code: int


def requested() -> Optional[int]:
    """The signal that has come to this process since its last :func:`postponed`; None: none has."""
    return _signal


class AgreedStop:
    """All processes of a store hear, one step later, that one of them was asked to stop; nobody waits for that."""

    def __init__(self, store: Any) -> None:
        self._sum = BackgroundSum(store, STOP, 1)
        self._pending: Any = None  # an array that becomes how many had been asked at the last call

    def asked(self, here: bool) -> bool:
        """Whether a process had been asked at the last call; `here`: whether this one has been by now."""
        stops = self._pending is not None and bool(self._sum.read(self._pending).any())
        self._pending = self._sum.sum([here])
        return stops


@contextlib.contextmanager
def postponed(is_main: Callable[[], bool]) -> Iterator[None]:
    """Within this block, Ctrl-C and SIGTERM are noted; a second one raises KeyboardInterrupt at once.

    Process 0 saves and leaves after a step of all processes. So the others only note Ctrl-C, and go on until then.
    One that becomes process 0 after a loss calls :func:`lead`.
    """
    global _signal, _note_sigterm
    _signal = None

    def note(number: int, _frame: Any) -> None:
        global _signal
        if is_main() and _signal is not None:
            raise KeyboardInterrupt
        _signal = number
        if is_main():  # not print(): the signal may have come in the middle of one, and a second one is refused then
            os.write(2, b"\nStopping after this step; once more stops at once.\n")

    with signals_handled({signal.SIGINT: note}), contextlib.ExitStack() as stack:
        _note_sigterm = functools.cache(lambda: stack.enter_context(signals_handled({signal.SIGTERM: note})))
        if is_main():
            lead()
        try:
            yield
        finally:
            _note_sigterm = None


def lead() -> None:
    """Note SIGTERM too, as process 0 does, until the block of :func:`postponed` ends."""
    if _note_sigterm is not None:
        _note_sigterm()


@contextlib.contextmanager
def signals_handled(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Within this block, each of these signals calls its function of (number, frame)."""
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals nowhere else
        handlers = {}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is handlers[number]:  # a later block may have begun before this one ended
                signal.signal(number, handler)
