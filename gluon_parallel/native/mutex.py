"""Mutexes that Python and the C library hold."""

import contextlib
from collections.abc import Iterator

import numpy as np

from . import function
from .records import address_of

_BYTES = 64  # of a pthread mutex, at most


def new_mutex() -> np.ndarray:
    """(64,) bytes that hold a recursive mutex."""
    memory = np.zeros(_BYTES, np.uint8)
    function("gp_make_mutex", 1)(address_of(memory))
    return memory


@contextlib.contextmanager
def locked(mutex: np.ndarray) -> Iterator[None]:
    """Hold the mutex; Python's lock is not held while waiting for it, and Ctrl-C ends the wait."""
    address = address_of(mutex)
    try:  # before the wait: Ctrl-C may come when the mutex is held already; to unlock one that is not held is no harm
        while _lock(address):
            pass
        yield
    finally:
        _unlock(address)


@contextlib.contextmanager
def unlocked(mutex: np.ndarray) -> Iterator[None]:
    """Let go of a mutex that this thread holds once, within the block."""
    address = address_of(mutex)
    _unlock(address)
    try:
        yield
    finally:
        while _lock(address):
            pass


_lock, _unlock = function("gp_lock", 1), function("gp_unlock", 1)
