"""Exceptions that travel with MXNet's arrays: raised where an array is waited for, told once.

MXNet's engine keeps a C++ exception with every array that a failed operator should have written. Operators that read
such an array are skipped and hand the exception on; ``asnumpy``, ``wait_to_read`` and ``waitall`` raise it, and forget
it. The engine takes the exception from us as a C++ object, whose text is all that comes back: it has a number, by
which the Python exception is found again.
"""

import collections
import copy
import ctypes
import itertools
import threading

from ..compat import mx

_NAME = "GluonParallelFailure"  # MXNet looks up the type of an exception by the word before the first colon
_KEPT = 1000  # failures whose exceptions are remembered; of older ones the text is raised

# std::runtime_error(char const*): dmlc::Error is one, and adds nothing. The engine copies it at once.
_construct = ctypes.CDLL("libstdc++.so.6")._ZNSt13runtime_errorC1EPKc
_construct.argtypes, _construct.restype = [ctypes.c_void_p, ctypes.c_char_p], None
_SIZE = 64  # bytes; such an object takes 16

_lock = threading.RLock()  # the garbage collector may free a store within, whose last wait raises one of these
_numbers = itertools.count(1)
_failures: collections.OrderedDict = collections.OrderedDict()  # number -> _Failure


class _Failure:
    def __init__(self, error):
        self.error = error
        self.is_told = False
        self.is_carried = True  # by arrays
        self.memory = ctypes.create_string_buffer(_SIZE)  # of the C++ object


def text_of(error):
    """Type and text of an exception, also where its ``__str__`` fails.

    Example:
        >>> text_of(ValueError("a negative length"))
        'ValueError: a negative length'
    """
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the engine waits for the text
        return f"{type(error).__name__} (its __str__ fails)"


def _failure_of(error):
    """The failure of `error`, made at its first use."""
    failure = next((failure for failure in _failures.values() if failure.error is error), None)
    if failure is None:
        number, failure = next(_numbers), _Failure(error)
        text = f"{_NAME}: {number}: {text_of(error)}"
        _construct(ctypes.addressof(failure.memory), text.encode(errors="replace").replace(b"\0", b"?"))
        _failures[number] = failure
        if len(_failures) > _KEPT:
            _failures.popitem(last=False)
    return failure


def address(error):
    """The address of the C++ exception that stands for `error`: what a function in the engine ends with."""
    with _lock:
        return ctypes.addressof(_failure_of(error).memory)


def tell(error):
    """Note that `error` has been raised where somebody sees it."""
    with _lock:
        _failure_of(error).is_told = True


def remember(error):
    """Keep `error`, which no array can carry, for :func:`check`, once, however many functions it ended."""
    with _lock:
        failure = _failure_of(error)
        failure.is_told = failure.is_carried = False


def check():
    """Raise the first exception since the last check that no array could carry, if any."""
    with _lock:
        failure = next((one for one in _failures.values() if not one.is_told and not one.is_carried), None)
        if failure is None:
            return
        failure.is_told = True
    raise fresh(failure.error).with_traceback(failure.error.__traceback__)


def is_told(error):
    """Whether `error` has been raised already, by an array that it travelled with or by who called :func:`tell`."""
    with _lock:
        return any(failure.error is error and failure.is_told for failure in _failures.values())


def is_ours(message):
    """Whether MXNet's message is that of one of these exceptions."""
    return message.startswith(f"{_NAME}: ")


def untold():
    """The exceptions that nobody has seen, oldest first; they count as told from now on."""
    with _lock:
        found = [failure for failure in _failures.values() if not failure.is_told]
        for failure in found:
            failure.is_told = True
    return [failure.error for failure in found]


def fresh(error):
    """A copy of `error` for another thread to raise, so that its traceback is its own."""
    try:
        again = copy.copy(error)
    except TypeError:  # its constructor wants something else than its arguments
        return error
    again.__cause__ = error.__cause__
    return again


def _explain(message):
    """The Python exception for the text of one of ours, for MXNet to raise."""
    number = message.split(":", 2)[1]
    with _lock:
        failure = _failures.get(int(number))
        if failure is None:
            return mx.base.MXNetError(message)
        failure.is_told = True
    return fresh(failure.error)


mx.error.register(_NAME, _explain)
