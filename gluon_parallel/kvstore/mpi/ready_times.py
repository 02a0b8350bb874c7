"""Times at which the arrays of a list of keys become ready, measured once, and added up over the processes."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...compat import mx
from ...engine import push, view
from .shared_memory.sums import Pushes

if TYPE_CHECKING:
    from .shared_memory.memory import SharedMemory

_MEASURED = 2  # the call in which times are measured; in the first one, the step allocates its memory and more
_FIRST_OF_ALL = 1 << 30  # priority of what notes the time


class ReadyTimes:
    """Measures at the second call when its arrays become ready, and knows that on all processes from the third one on.

    All processes come to the calls in one order, so they know the times at the same call; the sums have the same bits.
    A process without samples adds times that hardly differ, and so leaves the order to the others.

    Args:
        shared, name: memory through which the times are added up, under that name.
        num: of keys.
    """

    def __init__(self, shared: SharedMemory, name: bytes, num: int) -> None:
        self.times: Any = None  # (num,) seconds, or None if they are not known yet
        self._shared, self._name, self._num = shared, name, num
        self._calls = 0
        self._total: Any = None

    def call(self, values: Sequence[Sequence[Any]]) -> bool:
        """Take note of a call with these arrays of each key; whether the times are known from this one on."""
        if self.times is not None:
            return False
        if self._total is not None:
            self.times = self._total.asnumpy()  # of the last step; what this one computes has been launched
            return True
        self._calls += 1
        if self._calls == _MEASURED:
            self._measure(values)
        return False

    def _measure(self, values: Sequence[Sequence[Any]]) -> None:
        device, mine = mx.cpu(0), np.zeros(self._num)
        marks = [mx.nd.zeros(1, ctx=device) for _ in values]

        def note(number: int) -> None:
            mine[number] = time.monotonic()

        def hand_over() -> None:
            np.copyto(view(total), mine - mine.min())

        for number in reversed(range(self._num)):  # so arrays that are ready before this leave the order as it was
            noted = functools.partial(note, number)
            push(noted, values[number], [marks[number]], device, "gluon_parallel.ready", _FIRST_OF_ALL)
        total = mx.nd.zeros(self._num, ctx=device, dtype="float64")
        push(hand_over, marks, [total], device, "gluon_parallel.ready")
        form = f"float64 ({self._num},)".encode()
        exchange = self._shared.sums(self._name, form, total).exchange([total], [total])
        Pushes(self._shared, [exchange], [0]).push()
        self._total = total
