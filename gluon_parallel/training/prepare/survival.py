"""Survival of lost processes: the others repeat what was under way, or copy its result from one that has it."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from ... import kvstore
from ...compat import mx
from ...compat.array_types import as_legacy, leaves
from ...data_parallel import DataParallel
from ...engine.failures import drop_tracebacks
from ...errors import LOG
from ...kvstore import heartbeat
from ...kvstore.exchange import gather
from ...kvstore.objects import gather_objects
from ...nn.sync_batch_norm.participants import groups_of
from ...nn.sync_batch_norm.sync_group import drain
from ...split import map_arrays
from ..checkpoint import restore, state

if TYPE_CHECKING:
    from .loop import Loop

_STEP = object()  # in the place of a result: the state that training has come to


class Survival:
    """What all processes do together is numbered, and either done everywhere or by none in the end.

    No process can have done number n + 1 before all have contributed to number n. So when one is lost, those that are
    left are at most one number apart. Who is behind takes the result from one that has it: of a step, the state of the
    net and its trainer. If all are equally far, all repeat what was under way, with what the lost process had
    divided among them.

    A step's result is committed when all sums over the processes are there (:attr:`.DataParallel.commits`); before,
    it has changed nothing but what is kept here. So no copy of the weights is needed.

    Args:
        loop: whose loaders, rank and store are those of the processes that are left, after a loss.
        parallel: what makes its steps.
    """

    def __init__(self, loop: Loop, parallel: DataParallel) -> None:
        self._loop, self._parallel = loop, parallel
        parallel.commits = True
        self._has_begun = False
        self._number = 0
        self._last: Any = None  # the result of the last number
        if loop.run:  # another process may have to write there
            loop.run.share(gather_objects(str(loop.run.folder), loop.store, "gp.prepare()")[0])

    def step(self, x: Any, y: Any) -> Any:
        """:meth:`.DataParallel.step`."""
        parallel, batch = self._parallel, (x, y)
        under_way = self._pass_of(batch)
        if under_way is None or parallel.accumulate > 1 or not self._has_begun:
            loss = parallel.step(x, y)  # the first one gives all processes the same weights
            if not self._has_begun:
                heartbeat.send(heartbeat.GOES_ON)
            self._has_begun, self._number, self._last = True, self._number + 1, _STEP
            return loss

        def repeat() -> None:
            nonlocal batch
            under_way.go_to(under_way.number - 1)
            self._loop._reseed()
            anew = (leaf for _, leaf in leaves(next(under_way)))
            batch = map_arrays(lambda _: next(anew), batch)

        result = self._run(lambda: parallel.step(*batch), self._keep(), repeat, _STEP)
        return parallel.mean if result is _STEP else result

    def run(self, exchange: Callable[[], Any]) -> Any:
        """What ``exchange()`` returns, the same on all processes."""
        epochs = [loader.epoch for loader in self._loop.loaders]

        def repeat() -> None:
            for loader, epoch in zip(self._loop.loaders, epochs):
                if loader.epoch != epoch:  # a pass of the exchange, which has begun
                    loader.set_epoch(epoch)

        return self._run(exchange, lambda: None, repeat)

    def _run(
        self, exchange: Callable[[], Any], undo: Callable[[], None], repeat: Callable[[], None], kept: Any = None
    ) -> Any:
        """Do the next number: ``exchange()``. After a loss ``undo()`` it, and ``repeat()`` before it is done again.

        What others are given that have not done it is `kept`, or else what ``exchange()`` has returned.
        """
        while True:
            try:
                result = exchange()
            except Exception:
                if not kvstore.has_failed(self._loop.store):
                    raise
                is_done, result = self._regroup(undo)
                if not is_done:
                    repeat()
                    continue
            self._number += 1
            self._last = result if kept is None else kept
            return result

    def _regroup(self, undo: Callable[[], None]) -> tuple[bool, Any]:
        """Go on with those that are left; returns whether another one has done what was under way, and its result."""
        loop, began, lost = self._loop, time.monotonic(), []
        while True:
            drain()
            drop_tracebacks()
            undo()
            lost += kvstore.regroup(loop.store)
            try:
                for group in groups_of(self._parallel.net):
                    group.reconnect(loop.store)
                self._parallel.restart()
                loop.rank, loop.is_main = loop.store.rank, loop.store.rank == 0
                for loader in loop.loaders:
                    loader.divide(loop.rank, loop.store.num_workers)
                numbers = gather(loop.store, "gp.prepare()", np.array([float(self._number)]))[:, 0]
                is_behind, result = numbers.max() > self._number, None
                if numbers.min() < numbers.max():
                    result = self._take(int(numbers.argmax()), is_behind)
                break
            except Exception:
                if not kvstore.has_failed(loop.store):  # else the next one has been lost
                    raise
        loop.run.begin(loop.is_main)
        if loop.is_main:
            names, left = ", ".join(map(str, lost)), loop.store.num_workers
            seconds = time.monotonic() - began
            LOG.warning(
                f"gluon_parallel: lost in step {loop.num_steps + 1}: process {names}; "
                f"{left} go on after {seconds:.2f} s"
            )
        return is_behind, result

    def _take(self, source: int, is_behind: bool) -> Any:
        """The last result of process `source`, put into net and trainer if it is a step's; those behind need it."""
        loop, parallel, mine = self._loop, self._parallel, None
        if loop.rank == source:
            is_step = self._last is _STEP
            mine = is_step, state(parallel.net, parallel.trainer) if is_step else self._last
        is_step, result = gather_objects(mine, loop.store, "gp.prepare()")[source]
        if is_step and is_behind:
            restore(result, parallel.net, parallel.trainer)
        return _STEP if is_step else result

    def _keep(self) -> Callable[[], None]:
        """Copy what a step changes before it is committed; returns the function that puts it back."""
        alike: dict[tuple, list[Any]] = {}  # running statistics of one device and dtype: one operator copies them
        for parameter in self._statistics:
            for array in map(as_legacy, parameter.list_data()):
                alike.setdefault((array.context, array.dtype), []).append(array)
        copies = [(arrays, mx.nd.concat(*arrays, dim=0)) for arrays in alike.values()]
        scaler: Any = getattr(self._parallel.trainer, "_amp_loss_scaler", None)
        scale = None if scaler is None else dict(vars(scaler))

        def put_back() -> None:
            for arrays, copy in copies:
                ends = np.cumsum([array.size for array in arrays]).tolist()
                for array, end in zip(arrays, ends):
                    array[:] = copy[end - array.size : end]
            if scale is not None:
                vars(scaler).update(scale)

        return put_back

    @functools.cached_property
    def _statistics(self) -> list[Any]:
        """The parameters that no optimizer changes, but the net: its running statistics, each (C,)."""
        parameters = self._parallel.net.collect_params().values()
        return [one for one in parameters if not one._differentiable and len(one.shape) == 1]

    def _pass_of(self, batch: Any) -> Any:
        """The pass over a loader of which `batch` is the last one, as it is; else None."""
        mine = _numbers(batch)
        passes = [loader.under_way for loader in self._loop.loaders if loader.under_way is not None]
        return next((one for one in passes if _numbers(one.batch) == mine), None)


def _numbers(batch: Any) -> list[int]:
    return [id(leaf) for _, leaf in leaves(batch)]
