"""Exceptions that travel with MXNet's arrays: raised where an array is waited for, reported once.

MXNet's engine keeps a C++ exception with every array that a failed operator should have written. Operators that read
the array hand it on; ``asnumpy``, ``wait_to_read`` and ``waitall`` raise it, and forget it. MXNet returns only a text;
that of a Python function's contains a number, under which this file keeps the Python exception.
"""

from __future__ import annotations

import collections
import copy
import ctypes
import itertools
import threading
from typing import TypeVar

from ..compat import mx

_E = TypeVar("_E", bound=BaseException)
_NAME = "GluonParallelFailure"  # MXNet looks up the type of an exception by the word before the first colon
_KEPT = 1000  # failures whose exceptions are kept, first those that nobody has seen; of others the text is raised

# std::runtime_error(char const*): dmlc::Error is one, and adds nothing. The engine copies it at once.
_construct = ctypes.CDLL("libstdc++.so.6")._ZNSt13runtime_errorC1EPKc
_construct.argtypes, _construct.restype = [ctypes.c_void_p, ctypes.c_char_p], None
_SIZE = 64  # bytes; such an object takes 16

_lock = threading.RLock()  # while it is held, the garbage collector may end a store, which waits and calls `_explain`
_numbers = itertools.count(1)
_failures: collections.OrderedDict[int, _Failure] = collections.OrderedDict()  # by number
kept = _failures  # for whoever asks often whether there are any


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.is_reported = False
        self.is_carried = True  # an array will raise it; else `check` must
        self.memory = ctypes.create_string_buffer(_SIZE)  # of the C++ object


def text_of(error: BaseException | None) -> str:
    """Type and text of an exception, also where its ``__str__`` fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the engine waits for the text
        return f"{type(error).__name__} (its __str__ fails)"


def _failure_of(error: BaseException) -> _Failure:
    """The failure of `error`, made at its first use."""
    failure = next((failure for failure in _failures.values() if failure.error is error), None)
    if failure is None:
        number, failure = next(_numbers), _Failure(error)
        text = f"{_NAME}: {number}: {text_of(error)}"
        _construct(ctypes.addressof(failure.memory), text.encode(errors="replace").replace(b"\0", b"?"))
        _failures[number] = failure
        if len(_failures) > _KEPT:
            del _failures[next((n for n, one in _failures.items() if one.is_reported), next(iter(_failures)))]
    return failure


def memory_of(error: BaseException) -> ctypes.Array:
    """The memory, to be kept, of the C++ exception for `error`; the engine's completion callback copies it."""
    with _lock:
        return _failure_of(error).memory


def mark_reported(error: BaseException) -> None:
    """Note that `error` has been raised in the user's program, so that it is not reported again."""
    with _lock:
        _failure_of(error).is_reported = True


def remember(error: BaseException) -> None:
    """Keep `error`, which no array can carry, for :func:`check`, once, however many functions it ended."""
    with _lock:
        _failure_of(error).is_carried = False


def forget(error: BaseException) -> None:
    """Keep `error` no longer: no array carries it any more."""
    with _lock:
        for number in [number for number, failure in _failures.items() if failure.error is error]:
            del _failures[number]


def put_back(error: BaseException) -> None:
    """Have :func:`check` raise `error`, which was reported to this package, not to the user."""
    with _lock:
        failure = _failure_of(error)
        failure.is_reported = failure.is_carried = False


def check() -> None:
    """Raise the oldest exception that no array could carry and that was not raised yet, if any."""
    with _lock:
        failure = next((one for one in _failures.values() if not one.is_reported and not one.is_carried), None)
        if failure is None:
            return
        failure.is_reported = True
    raise fresh(failure.error).with_traceback(failure.error.__traceback__)


def is_reported(error: BaseException) -> bool:
    """Whether `error` has been raised already: by an array that it travelled with, or see :func:`mark_reported`."""
    with _lock:
        return any(failure.error is error and failure.is_reported for failure in _failures.values())


def drop_tracebacks() -> None:
    """Forget where the kept exceptions were raised: frames hold what the functions in them had, such as memory."""
    with _lock:
        for failure in _failures.values():
            error: BaseException | None = failure.error
            while error is not None:
                error.__traceback__ = None
                error = error.__cause__ or error.__context__


def is_ours(message: str) -> bool:
    """Whether MXNet's message is that of one of these exceptions."""
    return message.startswith(f"{_NAME}: ")


def take_unreported() -> list[BaseException]:
    """The exceptions that nobody has seen, oldest first; they count as reported from now on."""
    with _lock:
        found = [failure for failure in _failures.values() if not failure.is_reported]
        for failure in found:
            failure.is_reported = True
    return [failure.error for failure in found]


def fresh(error: _E) -> _E:
    """A copy of `error` for another thread to raise, so that its traceback is its own."""
    try:
        again = copy.copy(error)
    except Exception:  # its constructor takes something else than its `args`
        return error
    if text_of(again) != text_of(error):  # or makes another text of them
        return error
    again.__context__, again.__cause__ = error.__context__, error.__cause__
    again.__suppress_context__ = error.__suppress_context__  # last: setting a cause sets it
    return again


def _explain(message: str) -> BaseException:
    """The Python exception of a message that `_failure_of` wrote; MXNet raises it."""
    number = message.split(":", 2)[1]
    with _lock:
        failure = _failures.get(int(number))
        if failure is None:
            return mx.base.MXNetError(message)
        failure.is_reported = True
    return fresh(failure.error)


mx.error.register(_NAME, _explain)
