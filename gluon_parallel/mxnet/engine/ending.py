"""Engine shutdown and fork: queued functions run before the interpreter ends or is copied."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from typing import Callable, TypeVar

from ...errors import LOG, DeviceNotLaunched
from ...native import keep_after_end
from ...native.records import C
from ..compat import mx
from .failures import put_back, text_of
from .functions import pending, settle

_F = TypeVar("_F", bound=Callable[[], object])
_FOLDERS = os.path.dirname(mx.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep
_MAX_FAILURES = 1000  # that are collected at the end of the program
_THREADS_TIMEOUT = 5.0  # seconds to wait for MXNet's threads to leave Python


_afterwards: list[Callable[[], object]] = []


def at_exit_after_engine(function: _F) -> _F:
    """Register `function` to run at exit after the engine has finished; `atexit` alone would run it before."""
    _afterwards.append(function)
    return function


INTERPRETER_STATE = keep_after_end(C.Interpreter())  # flags that the C library reads before it calls Python


def _finish() -> None:
    """At exit: run the engine's queued functions, and log failures whose result was never read."""
    unseen: list[BaseException] = []
    for _ in range(_MAX_FAILURES):
        try:
            unseen += settle()
            break
        except Exception as error:  # each call raises one; the next goes on with the rest
            unseen.append(error)
    INTERPRETER_STATE.has_ended = 1
    _let_threads_leave()
    printed = getattr(sys, "last_value", None)  # the exception that ended the program, with its traceback
    unseen = [error for error in unseen if not isinstance(error, DeviceNotLaunched)]  # the program ended within a step
    said = dict.fromkeys(map(text_of, unseen))
    said.pop(text_of(printed), None)
    for text in said:
        LOG.error(f"gluon_parallel: an operation failed, and its result was never read: {text}")
    for function in _afterwards:
        function()


# fork() holds the GIL while MXNet's own fork handler waits for its workers to end. A worker that needs the GIL, to run
# a function of ours or to leave it, would wait for ever.
def _before_fork() -> None:
    """Run the engine's queued functions. Waiting clears arrays of failures, so they are kept for the next call."""
    try:
        for error in settle():
            put_back(error)
    except mx.base.MXNetError as error:
        put_back(error)
    _let_threads_leave()


def _let_threads_leave() -> None:
    """Wait for MXNet's threads to leave Python, which would end them later; C++ then aborts the process."""
    end = time.monotonic() + _THREADS_TIMEOUT
    while (pending or _foreign_threads_in_python() or INTERPRETER_STATE.num_calls) and time.monotonic() < end:
        time.sleep(0.001)


def _foreign_threads_in_python() -> bool:
    """Whether a thread that Python did not start, such as the engine's, runs MXNet's or this package's code now."""
    ours = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    ours.add(threading.get_ident())
    others = [frame for ident, frame in sys._current_frames().items() if ident not in ours]
    frames = (one for frame in others for one, _ in traceback.walk_stack(frame))
    return any(one.f_code.co_filename.startswith(_FOLDERS) for one in frames)


atexit.register(_finish)

# Python 3.9's subprocess forks without calling these hooks.
os.register_at_fork(before=_before_fork, after_in_child=lambda: setattr(INTERPRETER_STATE, "num_calls", 0))
if sys.version_info < (3, 10):
    sys.addaudithook(lambda event, _arguments: _before_fork() if event == "subprocess.Popen" else None)
