"""Python stack of a process's main thread, for itself and for other processes of its host, whatever it is doing."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

_SIGNAL = signal.SIGRTMAX - 5  # one that programs hardly use
_NAME = "gluon_parallel-stack"
_FRAMES = 20  # of a stack that are shown, the innermost ones
_RUNNER = os.path.join("gluon_parallel", "commands", "run.py")
_HERE = os.path.dirname(__file__)  # handlers of signals
_WAIT = 1.0  # seconds for an answer
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


def listen() -> int:
    """Write the stack to a file in memory whenever the signal comes; returns the file's number, 0 if that cannot be.

    ``faulthandler`` does it in the signal's handler, in C: also where the main thread holds Python's lock.
    """
    with contextlib.suppress(OSError):
        if signal.getsignal(_SIGNAL) is signal.SIG_DFL:
            file = os.memfd_create(_NAME)
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
            faulthandler.register(_SIGNAL, file, all_threads=False)
            return file
    return 0


def of_process(process: int, file: int) -> str:
    """The stack of a process of this host, which :func:`listen` has given that file; "" if there is no answer."""
    with contextlib.suppress(OSError):
        name = f"/proc/{process}/fd/{file}"
        if _NAME in os.readlink(name):  # else another process has that number by now, and the signal would end it
            with open(name, "r+b", buffering=0) as opened:
                opened.truncate(0)
                os.kill(process, _SIGNAL)
                return _in_words(_answer(opened, process))
    return ""


def of_this_process() -> str:
    """The stack of this process's main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[tuple[str, int, str]] = []
    while frame is not None:
        code = frame.f_code
        frames.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return _joined(one for one in frames if not one[0].startswith(_HERE))


def _answer(file: Any, process: int) -> str:
    """What comes into a file, once no more does; a busy machine may stop that process in the middle of it."""
    until, text = time.monotonic() + _WAIT, b""
    while time.monotonic() < until:
        time.sleep(0.02)
        has_ended = not _answers(process)
        file.seek(0)
        before, text = text, file.read()
        if text and has_ended:
            break
        if text != before:
            until = time.monotonic() + _WAIT
    return text.decode(errors="replace")


def _answers(process: int) -> bool:
    """Whether the main thread of a process still has to answer, or writes: the signal is blocked meanwhile."""
    with open(f"/proc/{process}/status", encoding="ascii", errors="replace") as status:
        masks = re.findall(r"^(?:SigPnd|ShdPnd|SigBlk):\t(.*)$", status.read(), re.MULTILINE)
    return any(int(mask, 16) >> (_SIGNAL - 1) & 1 for mask in masks)


def _in_words(text: str) -> str:
    """The last one of the stacks that faulthandler has written, from the innermost call on.

    Example:
        >>> _in_words('Stack (most recent call first):\\n File "a.py", line 3 in load\\n File "b.py", line 9 in main')
        'a.py:3 load < b.py:9 main'
    """
    stacks = [_FRAME.findall(part) for part in text.split("most recent call first")]
    return _joined([[], *filter(None, stacks)][-1])


def _joined(frames: Iterable[tuple[str, Any, str]]) -> str:
    """Frames in words, without those of ours that have called the script."""
    own = itertools.takewhile(lambda frame: not frame[0].endswith(_RUNNER), frames)
    return " < ".join(f"{file}:{line} {name}" for file, line, name in itertools.islice(own, _FRAMES))
