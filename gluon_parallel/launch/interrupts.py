"""Ctrl-C and SIGTERM during a launch: counted, so that the group can be ended in order."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Interrupts:
    """How often Ctrl-C or SIGTERM came while a group ran."""

    def __init__(self) -> None:
        self.number = 0  # the last signal
        self.count = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[Interrupts]:
        if threading.current_thread() is not threading.main_thread():  # Python delivers signals nowhere else
            yield self
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: Any) -> None:
        self.number, self.count = number, self.count + 1
