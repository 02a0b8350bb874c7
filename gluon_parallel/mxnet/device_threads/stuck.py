"""Detection of a loop that waits for a result before it has launched all devices, so that the wait cannot end.

A layer that waits for the other devices asks a :class:`StuckLoop` several times a second. Its answer is certain only if

- a Python thread waits inside MXNet, at the same instruction as a while ago,
- no other Python thread can launch anything: each waits likewise, or runs only code of libraries, and
- nothing is computed: MXNet's threads and those that wait have used no processor time for a while, and none was kept
  from it by other programs.

So a slow device, a long compilation, a process that was stopped for a time and one on a busy machine are not taken for
such a loop.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import site
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from types import FrameType

from ..compat import mx
from .thread import device_threads

_OBSERVED = 1.5  # seconds during which nothing must have changed
_LONGEST_PAUSE = 1.2  # seconds between two looks; after a longer one the process was stopped, and all begins anew
_IDLE = 0.03  # share of one core below which these threads are idle,
_READY = 0.3  # if they have been ready to run, without a core, for less than this share of the time

_ROOM = Path(__file__).resolve().parents[1]
_PACKAGE = str(_ROOM.parent) + os.sep
_MXNET = os.path.dirname(os.path.abspath(mx.__file__)) + os.sep
_OPERATOR = os.path.join(_MXNET, "operator.py")  # where MXNet's engine enters Python
_ENGINE = str(_ROOM / "engine" / "functions.py")  # its `settle` waits for all operators
_THREADS = str(_ROOM / "device_threads" / "thread.py")
_FOLDERS = (
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    *getattr(site, "getsitepackages", list)(), site.getusersitepackages(),
)  # fmt: skip
_LIBRARIES = tuple(folder + os.sep for folder in _FOLDERS if folder)
# Libraries whose threads may launch devices, unlike those of a progress bar or of a notebook's kernel.
_LAUNCHING = tuple(f"{os.sep}{name}{os.sep}" for name in ("gluoncv", "gluonnlp", "d2l", "autogluon", "sockeye"))
_END = "the end of the program"  # which waits for all operators; nothing of the user's code runs any more


_asked: dict[int, float] = {}  # thread, by its number in the system -> when a device last waited in it


def note_wait() -> None:
    """A device waits in this thread, which wakes up now and then to see what the others do."""
    _asked[threading.get_native_id()] = time.monotonic()


class StuckLoop:
    """Watch the threads of this process while a device waits for others."""

    def __init__(self) -> None:
        self._since = self._last = 0.0
        self._before: dict[int, tuple[int, int]] | None = None
        self._times: dict[int, tuple[float, float]] = {}

    def look(self) -> str | None:
        """Where the loop waits, once it is certain that no device can be launched any more; else None.

        It is the line of the user's code, as text; or words where none waits.
        """
        now = time.monotonic()
        waits = self._waits()
        if waits is None or waits != self._before or now - self._last > _LONGEST_PAUSE:
            self._before, self._since, self._times = waits, now, _times(waits or {})
        self._last = now
        if waits is None or now - self._since < _OBSERVED:
            return None
        if self._computes(now, _times(waits)):
            self._before = None
            return None
        frames = [frame for frame in sys._current_frames().values() if _waits_for_mxnet(frame)]
        return next(filter(None, map(_user_line, frames)), _END)

    def _computes(self, now: float, times: dict[int, tuple[float, float]]) -> bool:
        """Whether threads have used processor time, or were ready to, since the observation began."""
        used = ready = 0.0
        for task, (after, ready_after) in times.items():
            before, ready_before = self._times.get(task, (0.0, 0.0))
            used += max(0.0, after - before)
            if _asked.get(task, 0.0) < self._since:  # else it wakes up to ask, and waits for a core each time
                ready += max(0.0, ready_after - ready_before)
        return used > _IDLE * (now - self._since) or ready > _READY * (now - self._since)

    def _waits(self) -> dict[int, tuple[int, int]] | None:
        """{thread: the instruction at which it waits}, or None if none waits or one may still launch a device."""
        waits: dict[int, tuple[int, int]] = {}
        for_mxnet = False
        for ident, frame in sys._current_frames().items():
            if ident == threading.get_ident():
                continue
            if _waits_for_mxnet(frame) or _waits_for_a_thread(frame):
                waits[ident] = (id(frame), frame.f_lasti)
                for_mxnet = for_mxnet or _waits_for_mxnet(frame)
            elif _may_launch(frame):
                return None
        return waits if for_mxnet else None


def _is_user_code(frame: FrameType) -> bool:
    """Whether its function is the user's, or one of a library that may launch devices."""
    name = frame.f_code.co_filename
    if name == "<string>" and "__name__" not in frame.f_globals:  # MXNet makes a function for each operator from text
        return False
    return not name.startswith((_PACKAGE, _MXNET, "<frozen", *_LIBRARIES)) or any(part in name for part in _LAUNCHING)


def _waits_for_mxnet(frame: FrameType) -> bool:
    """Whether the thread whose innermost frame this is is inside MXNet's library."""
    name, function = frame.f_code.co_filename, frame.f_code.co_name
    return name.startswith(_MXNET) or (name == _ENGINE and function == "settle")


def _waits_for_a_thread(frame: FrameType) -> bool:
    """Whether it waits for the end of another Python thread, or for a function that runs in a device's thread."""
    name, function = frame.f_code.co_filename, frame.f_code.co_name
    if name == threading.__file__:
        return function in ("join", "_wait_for_tstate_lock")
    return name == _THREADS and function == "__call__"  # of a `DeviceThread`, which calls nothing else meanwhile


def _may_launch(frame: FrameType) -> bool:
    """Whether the thread whose innermost frame this is runs something else than libraries or MXNet's engine."""
    outermost, launches = frame, False
    for outermost, _ in traceback.walk_stack(frame):
        if _is_user_code(outermost):
            return True
        launches = launches or outermost.f_code.co_filename.startswith(_MXNET)
    return launches and outermost.f_code.co_filename != _OPERATOR


def _user_line(frame: FrameType) -> str | None:
    """Where the innermost frame of the user's code is, as text; or None."""
    for user, number in traceback.walk_stack(frame):
        if _is_user_code(user):
            file, text = user.f_code.co_filename, linecache.getline(user.f_code.co_filename, number).strip()
            return f"{file}, line {number}, in {user.f_code.co_name}" + (f": `{text}`" if text else "")
    return None


def _times(waits: Collection[int]) -> dict[int, tuple[float, float]]:
    """Of MXNet's threads, the devices', and the Python threads `waits`: what :func:`_time_of` says of each."""
    others = {
        thread.native_id
        for thread in threading.enumerate()
        if thread.ident not in waits
        and thread.ident not in device_threads()
        and not isinstance(thread, threading._DummyThread)  # a thread of MXNet that has run Python code
    }
    others.add(threading.get_native_id())
    times = {}
    for task in map(int, os.listdir("/proc/self/task")):
        if task not in others:
            with contextlib.suppress(OSError):  # the thread has just ended
                times[task] = _time_of(task)
    return times


def _time_of(task: int) -> tuple[float, float]:
    """Seconds of processor time of a thread; and in which it was ready to run, and others had the cores."""
    folder = f"/proc/self/task/{task}"
    try:
        with open(f"{folder}/schedstat", encoding="ascii") as file:
            used, ready, _ = map(int, file.read().split())
        return used / 1e9, ready / 1e9
    except (FileNotFoundError, ValueError):  # a kernel that does not tell; or the thread has ended
        with open(f"{folder}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), 0.0
