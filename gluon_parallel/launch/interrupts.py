"""Ctrl-C and SIGTERM during a launch: counted, so that the group can be ended in order."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Within this block, a list that gets the number of each of these signals."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals nowhere else
        yield received
        return
    handled = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in handled}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
