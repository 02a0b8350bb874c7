"""Where the time of SyncBatchNorm layers goes, for whoever wants to make them faster."""

from __future__ import annotations

import contextlib
import time

from . import operator


@contextlib.contextmanager
def measured(places):
    """While this block runs, add up what the callbacks of these meeting places spend.

    Args:
        places: the layers' `place`.

    Yields:
        A dict that is filled at the end of the block: seconds of all devices together spent on ``"kernels"``
        (passes over the data), ``"waiting"`` (for other devices), ``"exchange"`` (with other processes), ``"Python"``
        (everything else inside the callbacks, compiled or not) and their sum ``"callbacks"``.

    Example:
        >>> with measured([]) as spent:
        ...     pass
        >>> spent["callbacks"]
        0.0
    """
    spent: dict[str, float] = {}
    total: list[float] = []
    kernels: list[float] = []
    chosen = set(map(id, places))
    original = operator._SyncBatchNorm.forward, operator._SyncBatchNorm.backward
    timed_methods = ("measure", "normalise", "sums", "gradient")

    def timed(method):
        def run(self, *args, **kwargs):
            if id(self.place) not in chosen:
                return method(self, *args, **kwargs)
            for name in timed_methods:
                setattr(self.arithmetic, name, _clocked(getattr(type(self.arithmetic), name), self.arithmetic, kernels))
            began = time.perf_counter()
            try:
                return method(self, *args, **kwargs)
            finally:
                total.append(time.perf_counter() - began)
                for name in timed_methods:
                    delattr(self.arithmetic, name)

        return run

    before = _spent(places)
    operator._SyncBatchNorm.forward, operator._SyncBatchNorm.backward = map(timed, original)  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        operator._SyncBatchNorm.forward, operator._SyncBatchNorm.backward = original  # type: ignore[method-assign]
        for name, seconds in _spent(places).items():
            spent[name] = seconds - before[name]
        spent["kernels"] += sum(kernels)
        spent["callbacks"] += sum(total)
        spent["Python"] = spent["callbacks"] - spent["kernels"] - spent["waiting"] - spent["exchange"]


def _spent(places):
    """What compiled callbacks have spent since the layers were made, and all of them at the barriers."""
    spent = {"kernels": 0.0, "waiting": 0.0, "exchange": 0.0, "callbacks": 0.0}
    for place in places:
        for name, seconds in place.lane.spent().items():
            spent[name] += seconds
        spent["waiting"] += place.barrier.waited
        spent["exchange"] += place.barrier.exchanged
    return spent


def _clocked(method, arithmetic, clock):
    def run(*args):
        began = time.perf_counter()
        try:
            return method(arithmetic, *args)
        finally:
            clock.append(time.perf_counter() - began)

    return run
