"""Backward passes of several devices that count as one, for the marks of fresh gradients; see `native/marks.c`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ...native import function

_num, _begin = function("gp_num_passes", 0, keeps_lock=True), function("gp_begin_pass", 0, keeps_lock=True)
_end = function("gp_end_passes", 1, keeps_lock=True)


@contextlib.contextmanager
def joint_pass() -> Iterator[None]:
    """The backward passes within this block, on all devices, are one."""
    before = _num()
    try:  # before it begins: Ctrl-C may come when it has, and MXNet's marks would stay hidden
        _begin()
        yield
    finally:
        _end(before)
