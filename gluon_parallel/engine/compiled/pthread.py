"""Mutexes and condition variables of the C library, for what compiled code and Python share."""

import contextlib
import ctypes
from collections.abc import Iterator

import numpy as np

from .records import address_of

_libc = ctypes.CDLL(None)
_BYTES = 64  # of a mutex, a condition variable, or their attributes
_MONOTONIC, _RECURSIVE = 1, 1


def _initialised(function: str, attribute_function: str, setting: int) -> np.ndarray:
    """(64,) bytes that hold an initialised pthread object with that attribute."""
    memory, attributes = np.zeros(_BYTES, np.uint8), (ctypes.c_char * _BYTES)()
    kind = function.split("_")[1]
    getattr(_libc, f"pthread_{kind}attr_init")(attributes)
    getattr(_libc, attribute_function)(attributes, setting)
    getattr(_libc, function)(ctypes.c_void_p(address_of(memory)), attributes)
    return memory


def new_mutex() -> np.ndarray:
    """(64,) bytes that hold a recursive mutex."""
    return _initialised("pthread_mutex_init", "pthread_mutexattr_settype", _RECURSIVE)


def new_condition() -> np.ndarray:
    """(64,) bytes that hold a condition variable whose limits are times of the monotonic clock."""
    return _initialised("pthread_cond_init", "pthread_condattr_setclock", _MONOTONIC)


@contextlib.contextmanager
def locked(mutex: np.ndarray) -> Iterator[None]:
    """Hold a mutex that compiled code knows too; Python's lock is not held while waiting for it."""
    _libc.pthread_mutex_lock(ctypes.c_void_p(address_of(mutex)))
    try:
        yield
    finally:
        _libc.pthread_mutex_unlock(ctypes.c_void_p(address_of(mutex)))


@contextlib.contextmanager
def unlocked(mutex: np.ndarray) -> Iterator[None]:
    """Leave a mutex, which this thread holds once, to other threads."""
    _libc.pthread_mutex_unlock(ctypes.c_void_p(address_of(mutex)))
    try:
        yield
    finally:
        _libc.pthread_mutex_lock(ctypes.c_void_p(address_of(mutex)))
