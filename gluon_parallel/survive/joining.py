"""Joining of a new process between two steps: what those that train do, and what it does itself."""

from __future__ import annotations

import functools
import time
from typing import Any, Callable, Optional

from .. import launcher
from ..mxnet.compat import mx
from . import meeting, newcomers
from .progress import Progress
from .regrouping import has_failed

# Goes on with those that are left, and with a new process, if a function is given that meets it.
Regroup = Callable[[Optional[Callable[[], None]]], object]


class Joining:
    """What this process does where others may join, or it joins them.

    Args:
        net, trainer, store: as of :class:`.Progress`.
        progress: of this process.
        regroup: has this process go on with others.
    """

    def __init__(
        self, net: mx.gluon.Block, trainer: mx.gluon.Trainer, store: Any, progress: Progress, regroup: Regroup
    ) -> None:
        self._store, self._progress, self._regroup = store, progress, regroup
        self._newcomers = newcomers.Newcomers(net, trainer, store)

    def between_steps(self) -> None:
        """Meet a new process, if all have heard of one; leave, if the launcher has asked this one to."""
        if self._newcomers.leaves:
            newcomers.leave_after_step()
        try:
            new = self._newcomers.after_step()
        except Exception:
            if not has_failed(self._store):
                raise
            return  # the next step deals with it
        if new is None:
            return
        self._progress.note_position()
        began = time.monotonic()
        try:
            self._regroup(functools.partial(self._newcomers.connect, new))
        except newcomers.Differs as error:
            self._newcomers.refuse(new, error)
            return
        except meeting.DidNotJoin as error:
            before = set(self._store.ranks)
            self._regroup(None)
            lost = ", ".join(map(str, sorted(before.difference(self._store.ranks))))
            self._newcomers.refuse(new, f"process {lost} was lost while it was met" if lost else error)
            return
        if new.number in self._store.ranks and self._store.rank == 0:
            num, seconds = self._store.num_workers, time.monotonic() - began
            text = f"joined after step {self._progress.num_steps}: process {new.number} on {new.host}; {num} go on "
            launcher.send(f"{launcher.SAYS}{text}after {seconds:.2f} s")

    def join(self) -> None:
        """In a new process: wait for those that train, and go on where they are."""
        try:
            self._progress.num_done = -1
            self._regroup(self._newcomers.accept)
        except Exception as error:
            newcomers.leave(error)
        launcher.send(launcher.GOES_ON)
        launcher.send(launcher.JOINED)
