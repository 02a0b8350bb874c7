"""Log of single steps: values that are read some steps later, and become rows of the run's metrics."""

import functools
import numbers
import time
from collections.abc import Mapping
from typing import Any, Optional

import numpy as np

from ...kvstore.collective import collective
from ...mxnet.compat.array_types import widened


class StepLog:
    """The rows of a loop's steps on their way to its run: one for each step that is due or has values of the caller's.

    All processes have the rows that are due, by the step's number, and add up their losses when these are read.
    """

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._row: Optional[dict[str, Any]] = None  # the newest one, until it is read

    def end_step(self, values: Mapping[str, Any]) -> None:
        """Begin the row of a step that is due."""
        self._begin(values, is_due=True)

    def add(self, values: Mapping[str, Any]) -> None:
        """Put values into the row of the last step; of an array its present value counts."""
        found = {name: one if isinstance(one, numbers.Real) else one.copy() for name, one in values.items()}
        if self._row is not None and self._row["step"] == self._loop.num_steps:
            self._row.update(found)
        else:
            self._begin(found, is_due=False)

    def _begin(self, values: Mapping[str, Any], is_due: bool) -> None:
        loop = self._loop
        self._row = {"step": loop.num_steps, "epoch": loop.epoch + (loop.step_in_epoch > 0), **values}
        loop._losses.later.add(functools.partial(self._write, self._row, time.perf_counter() if is_due else None))

    def _write(self, row: dict[str, Any], made_at: Optional[float]) -> None:
        loop, means = self._loop, {}
        self._row = None if self._row is row else self._row
        if made_at is not None and not loop._leaves_alone:
            with collective("training.step()"):
                found = loop._over_processes(loop._losses.lap(made_at))
            means = {**found.means(), "samples_per_second": found.rate} if found.num_samples else {}
        if loop.is_main:
            loop._begin_run()  # another process may have written
            loop.run.log_step(**{**means, **{name: _number(value) for name, value in row.items()}})


def _number(value: Any) -> float:
    if isinstance(value, int):
        return value
    return float(widened(value.asnumpy() if hasattr(value, "asnumpy") else np.asarray(value)).item())
