"""Limit for every wait on other processes, from the environment."""

import os
import threading
from typing import Any

from ..engine import push

LIMIT = "GLUON_PARALLEL_TIMEOUT"
_LONGEST = 9e8  # seconds; a wait of ten limits must stay below what threads can wait for, 9.2e9 seconds


def default_timeout(otherwise: float = 60) -> float:
    """The limit for every wait, in seconds: ``GLUON_PARALLEL_TIMEOUT``, or `otherwise` where it is not set.

    Raises:
        ValueError: the variable is no positive number, or too large a one.
    """
    text = os.environ.get(LIMIT, str(otherwise))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"{LIMIT}={text!r}: expected seconds above 0 and up to {_LONGEST:g}, as in {LIMIT}=60")
    return seconds


def arrives(array: Any, limit: float) -> bool:
    """Wait until `array` has been written, but not for more than `limit` seconds; returns whether it has."""
    arrived = threading.Event()
    push(arrived.set, read=[array], name="arrives", priority=1 << 20)
    return arrived.wait(limit)
