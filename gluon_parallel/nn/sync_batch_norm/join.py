"""Join for uneven inputs: a process without samples takes part in the exchanges that the others' layers begin."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ...environment import PATIENCE, default_timeout
from ...errors import BarrierBroken, BarrierTimeout, ExchangeError
from ...kvstore.collective import gather
from ...kvstore.contract import contract, is_distributed
from ...kvstore.work import name_of, wait_until
from ...mxnet.blocks import options_of
from ...mxnet.compat import mx
from ...mxnet.device_threads.thread import thread_of
from ..blocks import blocks_of
from .layer import SyncBatchNorm
from .participants import restart, sync_groups_of

_NAME = "a training step in which a process has no samples"  # for errors
_ADVICE = (
    "SyncBatchNorm layers beside the net must be part of it, or of a loss that is a block, or have no kvstore. "
    "Otherwise look for an error in another process"
)
_PAUSE = 0.001  # seconds between two gatherings


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # of all steps


def end_abandoned_steps() -> None:
    """Wait until the threads of steps that have broken off have ended: later they would take part in others."""
    for thread in list(_threads):
        thread.join()  # it ends: the exchange that it waits for has a limit


class _Step:
    """A step of a process with samples, in which others have none."""

    def __init__(self, announce: Callable[[_Step], None], before: threading.Thread | None) -> None:
        self.before = before  # the thread of an earlier step that was abandoned
        self.has_ended = self.is_abandoned = False
        self.error: Exception | None = None
        self.thread = threading.Thread(target=announce, args=[self], name="join", daemon=True)
        _threads.add(self.thread)
        self.thread.start()


class Join:
    """Steps of `net` in which some processes of `store`, the trainer's, have no samples.

    In such a step all processes gather, again and again, how many exchanges each layer has begun in each direction, and
    the number of the last call. A process without samples then runs the same passes, with counts of 0: it exchanges
    what the others do, in whatever order, and its running statistics follow theirs. The step ends when the passes of
    all others have. Steps in which all have samples gather nothing.

    Every process makes it before the first step, while nothing is in flight. It is false where `net` has no
    SyncBatchNorm layers, or there are no other processes.
    """

    def __init__(self, net: mx.gluon.Block, store: Any) -> None:
        self._net, self._store = net, store
        self.step: _Step | None = None  # that is under way
        self._abandoned: threading.Thread | None = None  # the thread of the last one that was abandoned
        layers = [block for block in blocks_of(net) if isinstance(block, SyncBatchNorm) and is_distributed(store)]
        self._layers = {layer.sync_group: layer for layer in layers}
        if self._layers:
            restart()  # where the net has moved, calls are counted anew; `prepare` does not
            self._gather(True)  # opens its keys, as the next line those of the layers, in one order on all processes
            for group, layer in self._layers.items():
                if all(layer.running_mean.shape):  # else it is not the trainer's, and has not run
                    group.prepare()

    def __bool__(self) -> bool:
        return bool(self._layers)

    def begin_step(self) -> None:
        """Called by the engine: a step has begun in which this process has samples, and others have none."""
        self.step = _Step(self._announce, self._abandoned)

    def end_step(self) -> None:
        """End such a step: wait until its passes, in which processes without samples take part, have ended."""
        step = self.step
        assert step is not None
        mx.nd.waitall()
        step.has_ended = True
        step.thread.join()
        self.step = None
        if step.error is not None:
            raise step.error

    def abandon_step(self) -> None:
        """The step has failed in this process: announce nothing more."""
        if self.step is not None:
            self.step.is_abandoned, self._abandoned, self.step = True, self.step.thread, None

    def _announce(self, step: _Step) -> None:
        if step.before is not None:
            step.before.join()
        try:
            while not step.is_abandoned and not self._gather(step.has_ended)[:, 0].all():
                time.sleep(_PAUSE)
        except Exception as error:
            step.error = error

    def follow(self) -> None:
        """Take part in a step of other processes in a process without samples, while nothing is in flight; waits."""
        records = [group.rendezvous.record for group in self._layers]
        try:
            for record in records:
                record.without_samples = 1
            # Exchanges wait side by side, so none may wait for another one's temporary buffer.
            thread_of("without samples")(self._follow)
            mx.nd.waitall()
        except BaseException as error:  # a pass that is under way must not go on as one with samples
            for group in self._layers:
                group.abandon(error)
            raise
        finally:
            for record in records:
                record.without_samples = 0

    def _follow(self) -> None:
        begun = {group: [exchange.begun()[0] for exchange in group.exchanges] for group in self._layers}
        outputs: dict[tuple[Any, float], list] = {}  # by sync group and number of a call
        backward = set()  # the same, of those that have gone backward
        ranks = list(contract(self._store).ranks)
        rows = np.empty(0)
        while True:
            rows = self._gather_other_than(rows)
            words = rows[:, 1:].reshape(len(rows), len(self._layers), 2, 2)
            for index, (group, layer) in enumerate(self._layers.items()):
                members = [ranks.index(rank) for rank in contract(group.store).ranks if rank in ranks]
                for direction, exchange in enumerate(group.exchanges):
                    number = max(words[members, index, direction, 0])
                    if number == begun[group][direction]:
                        continue
                    # Backward passes of one layer may have another order on each process.
                    calls = [call for one, call in words[members, index, direction] if one == number]
                    call = next((call for call in calls if not direction or (group, call) not in backward), None)
                    if call is None:
                        continue
                    begun[group][direction] += 1
                    if number != begun[group][direction] or (direction and (group, call) not in outputs):
                        raise ExchangeError(
                            f"{exchange.name}: the processes are out of step: others are at exchange {number:g}, call "
                            f"{call:g}, and this one, which has no samples, is at exchange {begun[group][direction]}. "
                            "Each must run this layer equally often; after an error in one of them, restart all"
                        )
                    if direction:
                        backward.add((group, call))
                        ys = outputs[group, call]
                        mx.autograd.backward(ys, [mx.nd.zeros_like(y) for y in ys], retain_graph=True)
                    else:
                        outputs[group, call] = _forward(layer)
            if rows[:, 0].all() or any(group.rendezvous.failure is not None for group in self._layers):
                return

    def _gather_other_than(self, before: np.ndarray) -> np.ndarray:
        """:meth:`_gather`, again and again until a process has begun an exchange, or ended the step."""
        rows = before

        def has_changed(_: float) -> bool:  # each gathering waits for all, and within the limit
            nonlocal rows
            rows = self._gather(True)
            return not np.array_equal(rows, before)

        where = f"{_NAME}: no exchange of the net's SyncBatchNorm layers has begun, and the step has not ended"
        wait_until(
            has_changed, PATIENCE * default_timeout(), lambda: (where, name_of(contract(self._store))), _ADVICE,
            kind=BarrierTimeout,
        )  # fmt: skip
        return rows

    def _gather(self, has_ended: bool) -> np.ndarray:
        """A row of each process: whether its passes have ended, and for each layer and direction (begun, last call)."""
        nothing = (0, 0), (0, 0)
        begun = [[exchange.begun() for exchange in group.exchanges] or nothing for group in self._layers]
        return gather(self._store, _NAME, np.array([has_ended, *np.ravel(begun)], np.float64))


def refuse_graphs(net: mx.gluon.Block) -> None:
    """Refuse a net with a graph without its layers, whose momentum is not known here, in a step without samples."""
    known = {block.sync_group for block in blocks_of(net) if isinstance(block, SyncBatchNorm)}
    for group in sync_groups_of(net):
        if group.spans_processes and group not in known:
            raise BarrierBroken(f"{group.name}: a graph without its Gluon layers cannot leave out a step; split evenly")


def _forward(layer: SyncBatchNorm) -> list[mx.nd.NDArray]:
    """Queue a forward pass of `layer` on all its devices, whose values do not matter; returns its outputs."""
    axis, parameters = options_of(layer)["axis"], (layer.gamma, layer.beta, layer.running_mean, layer.running_var)
    shape = [1] * max(2, axis + 1, -axis)
    shape[axis] = layer.gamma.shape[0]
    xs = [mx.nd.zeros(shape, ctx=device, dtype=layer.gamma.dtype) for device in layer.gamma.list_ctx()]
    for x in xs:
        x.attach_grad()
    with mx.autograd.record():  # detached, so that the gradients of gamma and beta stay what they are
        return [layer.hybrid_forward(mx.nd, x, *(one.data(x.ctx).detach() for one in parameters)) for x in xs]
