"""Parameter server in this process: versioned weights, handed out and updated, and how stale each update was.

A worker is granted a batch and the weights to work with, and pushes a gradient. Each mode says in three functions
when a worker may start, what a push does, and what changes when a worker leaves. There are no threads and no time:
threads and the simulator's virtual clock drive the same object, so a mode is the same thing in both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Optional

import numpy as np

from .rules import Array, Update


class Staleness:
    """Histograms of staleness, the number of updates between a worker's pull and its own push.

    Example:
        >>> staleness = Staleness(2)
        >>> for updates in (0, 1, 1, 5):
        ...     staleness.record(worker=0, updates=updates)
        >>> staleness.record(worker=1, updates=9, applied=False)
        >>> staleness.mean, staleness.quantiles(), staleness.rejected
        (1.75, (1, 5, 5), [0, 1])
    """

    def __init__(self, num_workers: int) -> None:
        self.histograms: list[Counter[int]] = [Counter() for _ in range(num_workers)]  # of the pushes applied
        self.rejected = [0] * num_workers  # pushes that were not: too old, or too late for their step

    def record(self, worker: int, updates: int, applied: bool = True) -> None:
        """Count one push, whose weights were `updates` updates old when it arrived."""
        if applied:
            self.histograms[worker][updates] += 1
        else:
            self.rejected[worker] += 1

    def since(self, before: Staleness) -> Staleness:
        """What was counted after `before`, which is a copy of this object at an earlier time."""
        found = Staleness(len(self.histograms))
        found.histograms = [now - then for now, then in zip(self.histograms, before.histograms)]
        found.rejected = [now - then for now, then in zip(self.rejected, before.rejected)]
        return found

    @property
    def total(self) -> Counter[int]:
        """The histogram of all workers together."""
        return sum(self.histograms, Counter())

    @property
    def mean(self) -> float:
        """Of all updates applied; 0 if there were none."""
        every = list(self.total.elements())
        return sum(every) / max(1, len(every))

    def quantiles(self) -> tuple[int, int, int]:
        """The smallest staleness that half, nine tenths and all of the updates do not exceed; 0 if there were none."""
        every = sorted(self.total.elements()) or [0]
        median, ninetieth, most = (every[math.ceil(share * len(every)) - 1] for share in (0.5, 0.9, 1.0))
        return median, ninetieth, most

    def __repr__(self) -> str:
        median, ninetieth, most = self.quantiles()
        text = f"staleness median {median}, 90 % {ninetieth}, most {most}"
        return text + (f", {sum(self.rejected)} pushes not applied" if any(self.rejected) else "")


class Grant(NamedTuple):
    """What a worker gets to work with."""

    weights: Array  # a version; nobody writes to it any more
    version: int  # updates before it
    batch: Any
    number: int  # grants before it, in this pass


class Pushed(NamedTuple):
    """What became of a push."""

    staleness: int  # updates between the pull and the push
    applied: bool  # False: it was rejected


def frozen(weights: Array) -> Array:
    """The array, which from now on refuses to be written to."""
    weights.flags.writeable = False
    return weights


class ParameterServer:
    """The newest weights, and which worker computes a gradient of which; without a KVStore.

    The learning rate is that of a round, in which every worker pushes once: a push that is applied by itself moves the
    weights by 1/num_workers of it. So it means the same distance per epoch in every mode.

    Args:
        weights: a flat array; it is copied.
        num_workers: numbered from 0.
        update: an update rule, see :func:`gluon_parallel.asynchronous.rules.optimizer`.
        lr: the learning rate; the attribute of that name may be changed at any time.
        reject_above: a push whose weights are more updates old than this is not applied; None: every push is.
    """

    def __init__(
        self, weights: Array, num_workers: int, update: Update, lr: float, reject_above: Optional[int] = None
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers: got {num_workers}, wanted at least 1")
        self.weights = frozen(np.array(weights))
        self.version = 0
        self.lr = lr
        self.num_workers = num_workers
        self.staleness = Staleness(num_workers)
        self.reject_above = reject_above
        self._update = update
        self.state: tuple = ()  # of the update rule
        self._batches: Iterator[Any] = iter(())
        self._gone = set(range(num_workers))
        self._granted: dict[int, Grant] = {}  # waiting to be taken
        self._at_work: dict[int, Grant] = {}
        self._number = 0
        self._num_pushes = [0] * num_workers  # in this pass, in vain or not

    # What a mode defines.

    def _may_start(self, worker: int) -> bool:
        """Whether an idle worker may begin its next step."""
        return True

    def _weights_for(self, worker: int) -> Array:
        """What a worker that starts now works with."""
        return self.weights

    def _received(self, worker: int, grant: Grant, gradient: Array, num_samples: float) -> bool:
        """Make use of a gradient; returns whether it was used."""
        raise NotImplementedError

    def _close(self) -> None:
        """Finish what was waiting for a worker that gets no more batches."""

    def _begun(self) -> None:
        """A pass begins."""

    # What workers, or those who drive them, call.

    def begin(self, batches: Iterable[Any]) -> None:
        """Begin a pass: every worker may start, on the next of the batches, in the order of their numbers."""
        self._batches, self._number = iter(batches), 0
        self._gone, self._granted, self._at_work = set(), {}, {}
        self._num_pushes = [0] * self.num_workers
        self._begun()
        self._grant()

    def take(self, worker: int) -> Optional[Grant]:
        """The worker's grant, or None as long as it has to wait; whether it waits in vain, :meth:`is_gone` says."""
        grant = self._granted.pop(worker, None)
        if grant is not None:
            self._at_work[worker] = grant
        return grant

    def push(self, worker: int, gradient: Array, num_samples: float = 1) -> Pushed:
        """Hand in the gradient of the mean loss over the batch that was granted last.

        Raises:
            ValueError: the worker has no grant, or the gradient is not shaped like the weights.
        """
        if worker not in self._at_work:
            raise ValueError(f"worker {worker} pushes a gradient without having taken a grant")
        if gradient.shape != self.weights.shape:
            raise ValueError(
                f"worker {worker} pushes a gradient of shape {gradient.shape}; the weights have {self.weights.shape}"
            )
        grant = self._at_work.pop(worker)
        updates = self.version - self._pulled(worker, grant)
        fresh_enough = self.reject_above is None or updates <= self.reject_above
        applied = fresh_enough and self._received(worker, grant, gradient, num_samples)
        self._num_pushes[worker] += 1
        self.staleness.record(worker, updates, applied)
        self._grant()
        return Pushed(updates, applied)

    def is_gone(self, worker: int) -> bool:
        """Whether there is nothing left for this worker in this pass."""
        return worker in self._gone

    def waiting_for(self) -> list[int]:
        """The workers that have a batch and have not pushed yet."""
        return sorted({*self._at_work, *self._granted})

    # What the modes share.

    @property
    def _active(self) -> list[int]:
        return [worker for worker in range(self.num_workers) if worker not in self._gone]

    def _pulled(self, worker: int, grant: Grant) -> int:
        return grant.version

    def _apply(self, gradient: Array, share: float = 1.0) -> None:
        weights, self.state = self._update(self.weights, gradient, self.state, self.lr * share)
        self._publish(weights)

    def _publish(self, weights: Array) -> None:
        # A rule that computes in float64 (Adam with NumPy's scalars) must not change what devices are sent.
        self.weights = frozen(weights.astype(self.weights.dtype, copy=False))
        self.version += 1

    def _grant(self) -> None:
        """Let everybody start who may, in the order of their numbers, all of them from the same version."""
        again = True
        while again:
            again = False
            for worker in self._active:
                if worker in self._granted or worker in self._at_work or not self._may_start(worker):
                    continue
                try:
                    batch = next(self._batches)
                except StopIteration:
                    self._gone.add(worker)
                    self._close()
                    again = True  # its leaving may have let others start
                    continue
                self._granted[worker] = Grant(self._weights_for(worker), self.version, batch, self._number)
                self._number += 1
