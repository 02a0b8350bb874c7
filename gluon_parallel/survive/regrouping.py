"""Regrouping: the processes that are left after a loss give up what was under way, and go on together."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np

from .. import kvstore, launcher
from ..errors import LOG
from ..mxnet.compat import mx
from ..mxnet.engine.failures import drop_tracebacks
from ..nn.sync_batch_norm.join import end_abandoned_steps
from ..nn.sync_batch_norm.participants import forget_failures, sync_groups_of
from ..nn.sync_batch_norm.sync_group import all_sync_groups
from ..step import trainer_loops
from . import meeting
from .progress import Progress
from .steps import Loader


def has_failed(store: Any) -> bool:
    """Whether the exchanges of `store` have failed, for a lost process or for another reason."""
    try:
        store.check()
    except Exception:  # whatever it was has ended them all
        return True
    return False


class Regrouper:
    """Brings this process together with those that are left after a loss, or with a new one.

    Args:
        net, trainer, loaders, store: as of :class:`.Progress`.
        progress: of this process.
    """

    def __init__(
        self, net: mx.gluon.Block, trainer: mx.gluon.Trainer, loaders: Sequence[Loader], store: Any, progress: Progress
    ) -> None:
        self._net, self._trainer, self._loaders, self._store = net, trainer, loaders, store
        self._progress = progress

    @kvstore.outermost()
    def regroup(self, is_step: bool, put_back: Callable[[], None], meet: Optional[Callable[[], None]] = None) -> Any:
        """Go on with those that are left; returns the result of what was under way, if another process has it.

        Args:
            is_step: whether a step was under way.
            put_back: undoes the steps since the last update.
            meet: meets a new process, with which this one goes on, too.
        """
        began, lost, store = time.monotonic(), [], self._store
        before = set(store.ranks)
        while True:
            if has_failed(store):
                store.end_exchanges()
            end_abandoned_steps()
            forget_failures()
            drop_tracebacks()
            put_back()
            trainer_loops.forget(self._trainer)
            if meet is None:
                lost += store.regroup()
            else:
                meet()
            try:
                if meet is not None:
                    meet = None
                    meeting.share_memory(store)
                self._reconnect()
                for loader in self._loaders:
                    loader.divide(store.rank, store.num_workers)
                result, rows = self._progress.share(is_step)
                break
            except Exception:
                if not has_failed(store):  # else the next one has been lost
                    raise
        lost = [number for number in lost if number in before]
        if lost:
            self._say(lost, rows, time.monotonic() - began)
        return result

    def _reconnect(self) -> None:
        """Have the SyncBatchNorm layers meet those that are left: those of the net first, which all processes have."""
        mine = sync_groups_of(self._net)
        gc.collect()  # else one process would meet for a net that is gone
        for group in [*mine, *(group for group in all_sync_groups() if group not in mine)]:
            if group.whole is self._store:
                group.reconnect(self._store)

    def _say(self, lost: Sequence[int], rows: np.ndarray, seconds: float) -> None:
        """One line per loss, in the logs of all processes and on the launcher's terminal."""
        _, step, in_step = rows[rows[:, 0].argmin()]
        loss = ([*lost], int(step), bool(in_step), self._store.num_workers, seconds)
        if not launcher.is_heard():
            LOG.warning(f"gluon_parallel: {launcher.left_out(*loss)}")
        elif self._store.rank == 0:
            launcher.send(launcher.LEFT_OUT + json.dumps(loss))
