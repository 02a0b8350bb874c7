"""Mean loss of an epoch: each step's loss is read when eight younger ones are there, so that the engine works ahead."""

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Callable, Optional

LAG = 8  # steps after which a loss is read; one that went wrong is noticed soon


class Losses:
    """The losses of this process's part of an epoch so far.

    Args:
        refuse: a function of a step and its loss, NaN or infinite, which raises.
        sums: of the losses over the samples before, by name: "loss" and its parts.
        num_samples: how many samples that were.

    Example:
        >>> import mxnet as mx
        >>> losses = Losses(refuse=print)
        >>> for step, loss in enumerate([1.0, 2.0, 6.0], start=1):
        ...     losses.add(step, mx.nd.array([loss]), num_samples=4)
        >>> losses.settle()
        >>> losses.sums, losses.num_samples
        ({'loss': 36.0}, 12)
    """

    def __init__(
        self, refuse: Callable[[int, float], None], sums: Optional[Mapping[str, float]] = None, num_samples: int = 0
    ) -> None:
        self.sums, self.num_samples = dict(sums or {"loss": 0.0}), num_samples
        self._refuse = refuse
        self._pending: deque[tuple[int, Any, int, Mapping[str, Any]]] = deque()
        self._samples_here = 0  # since the clock was started
        self.start_clock()

    def start_clock(self) -> None:
        """The time before, such as that of building the net, is none of the steps'."""
        self._begin = self._end = time.perf_counter()

    @property
    def rate(self) -> float:
        """Samples per second, until the last loss that :meth:`settle` has waited for."""
        return self._samples_here / max(self._end - self._begin, 1e-9)

    def add(self, step: int, loss: Any, num_samples: int, parts: Optional[Mapping[str, Any]] = None) -> None:
        """Note a step's mean loss, an array of one value, and the mean of each of its parts."""
        self._samples_here += num_samples
        self._pending.append((step, loss, num_samples, parts or {}))
        while len(self._pending) > LAG:
            self._read_oldest()

    def settle(self) -> None:
        """Wait for every loss that was added, and read it."""
        while self._pending:
            self._read_oldest()
            self._end = time.perf_counter()

    def so_far(self) -> str:
        """The mean loss and the samples per second, for a progress bar; empty before the first loss is read."""
        if not self.num_samples:
            return ""
        rate = self._samples_here / (time.perf_counter() - self._begin)
        return f"loss {self.sums['loss'] / self.num_samples:.4f}, {rate:.0f} samples/s"

    def _read_oldest(self) -> None:
        step, loss, num_samples, parts = self._pending.popleft()
        value = loss.asnumpy().item()
        if not math.isfinite(value):
            self._refuse(step, value)
        self.num_samples += num_samples
        for name, mean in {"loss": value, **{name: part.asnumpy().item() for name, part in parts.items()}}.items():
            self.sums[name] = self.sums.get(name, 0.0) + mean * num_samples
