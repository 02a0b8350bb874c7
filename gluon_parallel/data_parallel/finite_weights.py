"""Check in the background that the weights stay finite, for a NaN that the loss does not show."""

from __future__ import annotations

import collections

import numpy as np

from ..compat import mx
from ..engine import check, make_plain, push, view
from ..errors import NotFinite
from .gradients import trainable
from .precision import all_finite

_LONGEST = 8  # updates between two looks
_LAG = 10  # updates after which the result of a look is read: losses are read eight steps later, and shall come first


class FiniteWeights:
    """Looks for NaN and infinity in the weights after updates 1, 2, 4, 8 and every 8th from then on.

    A NaN stays in a weight that it has reached, so not every update has to be looked at, and no gradient. The engine
    reads the first device's weights while the next steps run, and nothing waits for it: the result is read before the
    tenth update that follows, on every process. So a NaN is noticed at most 17 updates after the one that wrote it.

    Args:
        trainer: whose parameters are looked at, those that have a gradient.
        accumulate: how many steps make an update, for the error.
    """

    def __init__(self, trainer: mx.gluon.Trainer, accumulate: int) -> None:
        self._trainer, self._accumulate = trainer, accumulate
        self._num_updates = self._before = 0
        self._next = 1
        # After which update it looked, and an array that becomes 1 if all weights are finite, else 0.
        self._pending: collections.deque[tuple[int, mx.nd.NDArray]] = collections.deque()

    def update_done(self) -> None:
        """After an update: start a look at the weights if it is time for one."""
        self._num_updates += 1
        if self._num_updates >= self._next:
            self._next = self._num_updates + min(self._num_updates, _LONGEST)
            self._start()

    def check(self, last: bool = False) -> None:
        """Before an update: read the result of the look after the tenth update before it, if there was one.

        Args:
            last: no update follows, so look at the weights of the last one, and read all results.

        Raises:
            NotFinite: names the first parameter and the step; on every process, since their weights are the same.
        """
        if last and self._num_updates > max([self._before, *(looked for looked, _ in self._pending)]):
            self._start()
        while self._pending and (last or self._pending[0][0] + _LAG <= self._num_updates + 1):
            looked, finite = self._pending.popleft()
            if not finite.asnumpy().all():
                check()  # where an exchange failed, the sum is NaN, and its error says why
                self._raise(looked)
            self._before = looked

    def _start(self) -> None:
        weights = [parameter.list_data()[0] for parameter in trainable(self._trainer)]
        on_host = [array for array in weights if array.ctx.device_type != "gpu"]
        on_gpus = [array for array in weights if array.ctx.device_type == "gpu"]
        others = [all_finite(on_gpus)] if on_gpus else []
        make_plain(*on_host)
        finite = mx.nd.empty(1, ctx=mx.cpu(), dtype="float64")
        self._pending.append((self._num_updates, finite))

        def look() -> None:  # NumPy's extremes are NaN where a value is, and ten times as fast as MXNet's operator
            arrays = [array for array in map(view, on_host) if array.size]
            finite_here = all(np.isfinite(array.max()) and np.isfinite(array.min()) for array in arrays)
            view(finite)[:] = finite_here and all(view(flag).all() for flag in others)

        push(look, read=[*on_host, *others], write=[finite], name="finite weights")

    def _raise(self, looked: int) -> None:
        bad = [one for one in trainable(self._trainer) if not np.isfinite(one.list_data()[0].asnumpy()).all()]
        if not bad:
            return  # they have been replaced since
        first, last = self._before * self._accumulate + 1, looked * self._accumulate
        when = f"step {last}" if first == last else f"one of the steps {first} to {last}"
        more = f", and {len(bad) - 1} more are" if len(bad) > 1 else ""
        raise NotFinite(
            f"parameter {bad[0].name} is NaN or infinite since {when}{more}. The loss need not show it: MXNet's ReLU "
            "makes NaN 0 on CPUs. NaN or infinity among the inputs of such a step is the usual cause, a learning rate "
            "that is too large the other one. Start again from the last checkpoint"
        )
