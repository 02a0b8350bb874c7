"""Staleness over MXNet's servers: one more weight counts the updates, and the age of the weights that are pulled.

MXNet's servers keep weights and an optimizer, and nothing else. So the count is one more weight, and the optimizer
that the server is sent treats it in its own way; what it has counted comes back when the processes pull it.
"""

from typing import Any

import numpy as np

from ..compat import mx
from ..kvstore.reserved_keys import CLOCK
from .staleness import Staleness

MOST = 255  # what is staler than this is counted as this


class Counting(mx.optimizer.Optimizer):
    """The optimizer that travels to the server: `inner` for all weights, and :func:`tick` for the clock."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def create_state_multi_precision(self, index, weight):
        return None if index == CLOCK else self.inner.create_state_multi_precision(index, weight)

    def update_multi_precision(self, index, weight, grad, state):
        if index == CLOCK:
            weight[:] = tick(weight.asnumpy(), grad.asnumpy())
        else:
            self.inner.update_multi_precision(index, weight, grad, state)


def tick(clock: np.ndarray, message: np.ndarray) -> np.ndarray:
    """The clock after a step.

    It is the number of steps and a histogram of staleness for every worker, (1 + num_workers * 256,), in float32, which
    counts to 16 million. `message` is as long: which worker it is, and the number of steps when it pulled its weights.

    Example:
        >>> clock = tick(tick(np.zeros(513), np.array([1.0, 0.0])), np.array([0.0, 0.0]))
        >>> clock[[0, 1 + 256, 1 + 1]].tolist()  # steps; worker 1's fresh one; worker 0's that was one step old
        [2.0, 1.0, 1.0]
    """
    clock = clock.copy()
    worker, pulled = int(message[0]), message[1]
    staleness = int(min(clock[0] - pulled, MOST))
    clock[1 + worker * (MOST + 1) + staleness] += 1
    clock[0] += 1
    return clock


class Clock:
    """A process's view of the server's clock; made before the store, ``dist_async``, is sent its optimizer."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self._newest = mx.nd.zeros(1 + store.num_workers * (MOST + 1), ctx=mx.cpu())
        store.init(CLOCK, self._newest)

    def pull(self) -> None:
        """Read the clock; waits for it, so that weights that are pulled afterwards are not older than it says."""
        self.store.pull(CLOCK, out=self._newest)
        self._newest.wait_to_read()

    def push(self) -> None:
        """Say that this process has pushed an update, from weights as old as the last :meth:`pull`."""
        message = np.zeros(self._newest.shape, np.float32)
        message[:2] = self.store.rank, self._newest[0].asscalar()
        self.store.push(CLOCK, mx.nd.array(message, ctx=mx.cpu()))

    @property
    def staleness(self) -> Staleness:
        """Of all processes' updates until the last :meth:`pull`."""
        found = Staleness(self.store.num_workers)
        counts = self._newest[1:].asnumpy().reshape(self.store.num_workers, MOST + 1)
        for worker, histogram in enumerate(counts):
            found.histograms[worker].update({int(at): int(histogram[at]) for at in np.flatnonzero(histogram)})
        return found
