"""Sums of sample counts and other numbers of a step over the processes, in the background of the training."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from ..compat import mx
from ..engine import check, view
from ..errors import WorkerLost
from . import flight_recorder
from .contract import is_distributed
from .timeout import arrival, default_timeout

nd = mx.nd

PATIENCE = 10  # limits; another process may evaluate or write between two steps


class BackgroundSum:
    """Sums over the processes of one store, under a key of its own. Every process must make it before the first sum.

    Args:
        store: the trainer's; None without one.
        key: a whole number, as a trainer's keys are: a store takes numbers or names, not both.
        size: how many values each sum has.
    """

    def __init__(self, store: Any, key: int, size: int) -> None:
        self._store, self._key = store if is_distributed(store) else None, key
        self._last = None
        if self._store is not None:
            zeros = nd.zeros(size, ctx=mx.cpu(), dtype="float64")
            store.broadcast(key, zeros, [zeros])

    def sum(self, values: Any) -> Any:
        """Start a sum of arrays (`size`,) on any device, or of `size` numbers, ahead of all other exchanges.

        Returns:
            An array that becomes the sum, float64 on the CPU; `values` themselves where there is no other process.
        """
        if self._store is None:
            return values
        if self._last is not None:
            self._last.wait_to_read()  # of a step that broke off: ps-lite would add this one to that
        if isinstance(values, nd.NDArray):
            self._last = values.as_in_context(mx.cpu()).astype("float64")
        else:  # nd.array would wait until the engine has done what it was given before
            self._last = nd.empty(len(values), ctx=mx.cpu(), dtype="float64")
            view(self._last)[:] = values
        self._store.pushpull(self._key, [self._last], priority=1 << 20)
        return self._last

    @staticmethod
    def read(
        total: Any,
        missing: str = "no numbers of samples",
        hint: str = "take as many steps (gp.sampler.join sees to that)",
        arrived: threading.Event | None = None,
    ) -> np.ndarray:
        """Wait for a sum over the processes, such as :meth:`sum` starts; returns it as a NumPy array.

        Args:
            total: the array that becomes the sum.
            missing: for the error: what did not come.
            hint: for the error: what every process must do.
            arrived: :func:`.arrival` of `total`, where that is known.

        Raises:
            WorkerLost: another process did not send its part within ten times ``GLUON_PARALLEL_TIMEOUT``, or the
                exchange ended with an error.
        """
        limit = PATIENCE * default_timeout()
        if not (arrival(total) if arrived is None else arrived).wait(limit):
            problem = (f"{missing} came from the other processes within {limit:g} s. ") + flight_recorder.advice(
                f"Every process must {hint}; look for an error in another process"
            )
            raise WorkerLost(f"{problem}. {flight_recorder.write(f'WorkerLost: {problem}')}")
        values = total.asnumpy()
        if np.isnan(values).any():  # what an exchange leaves behind that could not be done
            check()
            raise WorkerLost("the processes' numbers could not be summed; an earlier error says why")
        return values
