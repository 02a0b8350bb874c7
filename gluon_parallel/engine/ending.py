"""Engine at the end of the program and before a fork: let queued functions run while Python can."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import traceback
from typing import Callable, TypeVar

from ..compat import mx
from ..errors import LOG, DeviceNotLaunched
from .compiled.records import Record
from .failures import put_back, text_of
from .functions import pending, settle

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[[], object])
_FOLDERS = os.path.dirname(mx.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep
_MOST_FAILURES = 1000  # that are collected at the end of the program
_MOST_SECONDS_TO_LEAVE = 5.0  # that a process waits, before it ends or is copied, for MXNet's threads to leave Python


def keep_after_end(something: _T) -> _T:
    """`something`, which Python's end does not free: threads of MXNet may still use it then."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(something))
    return something


_afterwards: list[Callable[[], object]] = []


def afterwards(function: _F) -> _F:
    """At the end of the program, call `function` when nothing is queued any more and failures are reported."""
    _afterwards.append(function)
    return function


class PythonEnds(Record):
    """What compiled code asks before it calls Python."""

    has_ended: int
    num_calls: int  # of threads that have asked that, and not yet returned from Python


PYTHON_ENDS = keep_after_end(PythonEnds())


def _finish() -> None:
    """Before the interpreter goes: let queued functions run while Python still can, and report what failed unseen."""
    unseen: list[BaseException] = []
    for _ in range(_MOST_FAILURES):
        try:
            unseen += settle()
            break
        except Exception as error:  # each call raises one; the next goes on with the rest
            unseen.append(error)
    PYTHON_ENDS.has_ended = 1
    _let_threads_leave()
    printed = getattr(sys, "last_value", None)  # by the interpreter
    unseen = [error for error in unseen if not isinstance(error, DeviceNotLaunched)]  # the program ended within a step
    said = dict.fromkeys(map(text_of, unseen))
    said.pop(text_of(printed), None)
    for text in said:
        LOG.error(f"gluon_parallel: nobody has read the result of what failed with {text}")
    for function in _afterwards:
        function()


def _before_fork() -> None:
    """Let queued functions finish; what failed is raised by the next call here, for waiting makes arrays forget it."""
    try:
        for error in settle():
            put_back(error)
    except mx.base.MXNetError as error:
        put_back(error)
    _let_threads_leave()


def _let_threads_leave() -> None:
    """Wait for threads of MXNet that have yet to free a function, or to return from one to C++.

    Python ends such a thread when it takes Python's lock after the program's end; C++ then aborts the process.
    """
    end = time.monotonic() + _MOST_SECONDS_TO_LEAVE
    while (pending or _foreign_threads_in_python() or PYTHON_ENDS.num_calls) and time.monotonic() < end:
        time.sleep(0.001)


def _foreign_threads_in_python() -> set[int]:
    """Identifiers of the threads that Python did not start, such as the engine's, which run MXNet's or our code now."""
    ours = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    ours.add(threading.get_ident())
    others = {ident: frame for ident, frame in sys._current_frames().items() if ident not in ours}
    return {ident for ident, frame in others.items()
            if any(one.f_code.co_filename.startswith(_FOLDERS) for one, _ in traceback.walk_stack(frame))}  # fmt: skip


atexit.register(_finish)

# fork() holds the GIL while MXNet's own fork handler waits for its workers to end, and one of those may need the GIL to
# run a function of ours, or to leave it after it has told the engine that it is done. Python 3.9's subprocess forks
# likewise, without asking these hooks.
os.register_at_fork(before=_before_fork, after_in_child=lambda: setattr(PYTHON_ENDS, "num_calls", 0))
if sys.version_info < (3, 10):
    sys.addaudithook(lambda event, _arguments: _before_fork() if event == "subprocess.Popen" else None)
