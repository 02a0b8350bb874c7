"""Progress of a training in this process, and what a process that is behind takes from one that is further."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np

from ..kvstore.collective import gather, object_of
from ..kvstore.handshake import without_comparison
from ..mxnet.compat import mx
from ..mxnet.parameters import forget_call_with_first_values, is_differentiable
from ..mxnet.trainers import has_made_store, set_progress_of_store
from .steps import Loader, Step

NOTHING: Any = object()  # in the place of a result that no other process has


class Progress:
    """How far this process is; :meth:`share` brings those that are behind to where the others are.

    Args:
        net, trainer: what is trained.
        loaders: the parts of this process.
        store: through which the processes meet.
        state, restore: ``state(net, trainer)`` returns what training has changed, which pickle takes, and
            ``restore(it, net, trainer)`` puts that of another process back.
        unfinished: what the step under way would have returned; None: what another process's step returned.
        loop: what begins in the middle in a new process: ``loop.content()`` returns what it has, which pickle takes,
            and ``loop.take(content)`` goes on from there.

    Attributes:
        num_steps, num_updates: how many have been made.
        epoch: that which is under way, or comes next.
        steps: those since the last update, the one under way included.
        num_done: how many updates and calls of functions all processes have done together; -1: this one joins them.
    """

    def __init__(
        self, net: mx.gluon.Block, trainer: mx.gluon.Trainer, loaders: Sequence[Loader], store: Any,
        state: Callable[..., Any], restore: Callable[..., None], unfinished: Optional[Callable[[], Any]], loop: Any,
    ) -> None:  # fmt: skip
        self._net, self._trainer, self._loaders, self._store = net, trainer, loaders, store
        self._state, self._restore, self._unfinished, self._loop = state, restore, unfinished, loop
        self.num_steps = self.num_updates = self.epoch = self.num_done = 0
        self.steps: list[Step] = []
        self._last: tuple[bool, Any] = False, None  # whether number `num_done` was an update, and its result
        self._position: Any = None  # where a new process begins

    def note_done(self, is_update: bool, result: Any) -> None:
        """Count what all have done together."""
        self.num_done += 1
        self._last = is_update, result
        if is_update:
            for parameter in self.changing:  # of those that no batch has reached yet, see `snapshot`
                forget_call_with_first_values(parameter)
            self.num_updates += 1
            self.steps.clear()

    def note_position(self) -> None:
        """Keep where the loop is, between two steps, for a new process."""
        content = None if self._loop is None else self._loop.content()
        passes = [loader.position for loader in self._loaders]
        self._position = passes, self.num_steps, self.num_updates, self.epoch, content

    def share(self, is_step: bool) -> tuple[Any, np.ndarray]:
        """All processes: the result that this one takes from one that is further, or NOTHING, and how far each was.

        Each row is (num_done, num_steps, is_step), of which a process that joins knows nothing.
        """
        row = np.array([self.num_done, self.num_steps, is_step], np.float64)
        rows = gather(self._store, "gp.survive()", row)
        numbers, result = rows[:, 0], NOTHING
        if numbers.min() < numbers.max():
            has_new = numbers.min() < 0
            result = self._take(int(numbers.argmax()), numbers.max() > self.num_done, has_new)
            if has_new:  # from here on it is one of them
                gather(self._store, "gp.survive()", np.zeros(1))
        return result, rows[numbers >= 0]

    def _take(self, source: int, is_behind: bool, has_new: bool) -> Any:
        """The last result of process `source`, if this one is behind it; of an update, the state goes into the net.

        One that is new (`has_new`) gets the state in any case, and where the loop is.
        """
        mine = None
        if self._store.rank == source:
            is_update, result = self._last
            result = None if is_update and self._unfinished is not None else result
            position = self._position if has_new else None
            mine = (
                is_update,
                self._state(self._net, self._trainer) if is_update or has_new else None,
                result,
                self.num_done,
                position,
            )
        found = object_of(source, mine, self._store, "gp.survive()")
        if not is_behind:
            return NOTHING
        is_update, archive, result, num_done, position = found
        is_new = self.num_done < 0
        if is_update or is_new:
            # The others have all weights. A new process makes its store here, where it knows all shapes.
            set_progress_of_store(self._trainer, not is_new or has_made_store(self._trainer), [])
            with without_comparison(self._store):
                self._restore(archive, self._net, self._trainer)
        if is_new:
            self._begin_at(position)
            self.num_done = num_done
            return NOTHING
        if is_update and self._unfinished is not None:
            result = self._unfinished()
        self.note_done(is_update, result)
        return result

    def _begin_at(self, position: tuple) -> None:
        """Go on from where the others were when they met this new process."""
        passes, self.num_steps, self.num_updates, self.epoch, content = self._position = position
        for loader, place in zip(self._loaders, passes):
            loader.set_epoch(*place)
        if self._loop is not None:
            self._loop.take(content)

    @property
    def changing(self) -> list[Any]:
        """What a step changes before it is committed: running statistics, in the first step all parameters."""
        return self._statistics if self.num_updates else list(self._net.collect_params().values())

    @functools.cached_property
    def _statistics(self) -> list[Any]:
        """Running statistics, taken to be what has no gradient and one axis, (C,)."""
        parameters = self._net.collect_params().values()
        return [one for one in parameters if not is_differentiable(one) and len(one.shape) == 1]
