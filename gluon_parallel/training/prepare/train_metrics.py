"""Metrics of the training steps of an epoch, updated with the outputs and labels of each step one step later."""

import copy
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ... import kvstore
from ...errors import LOG
from ...metrics.merging import has_sums, set_sums, sums
from ...metrics.metric_set import MetricSet
from ...metrics.whole_batches import whole_batch
from ...mxnet.compat import mx
from ...mxnet.compat.array_types import as_tuple
from ...mxnet.device_threads import parallel_apply
from ...step import DataParallel
from ...step.data_parallel import keep_labels, labels_of
from .progress import Later


class TrainMetrics:
    """What a training measures of its own steps.

    While the metrics read the results of one step, the devices already work on the next one.

    Args:
        parallel: makes the steps.
        store: through which merging them is repeated where it breaks off.
        meeting: through which all processes meet.
        saved: :meth:`sums` of a checkpoint within the epoch under way.
    """

    def __init__(self, parallel: DataParallel, store: Any, meeting: Any, saved: Mapping[str, Sequence[float]]) -> None:
        self._parallel, self._store, self._meeting, self._saved = parallel, store, meeting, saved
        self._sets: list[MetricSet] = []
        self._later = Later(lag=1)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._sets)

    def add(self, metric: Any, where: str) -> None:
        """Measure a metric of ``gp.evaluate`` too; `where`: which part of an epoch it does not see, or nothing."""
        added = MetricSet(metric, self._parallel.batch_axis)
        added.reset()
        known = {_key(one) for some in self._sets for one in some.metrics}
        for one in added.metrics:
            if _key(one) in known:
                raise ValueError(f"train_metric: {one.name} is measured already; call it once, before the first epoch")
            numbers = self._saved.get(_key(one), ())
            if has_sums(one) and len(sums(one)) == len(numbers):
                set_sums(one, numbers)
            elif where and self._meeting.rank == 0:
                LOG.warning(f"gluon_parallel: train_metric: {one.name} of {where}")
        self._sets.append(added)
        keep_labels(self._parallel)

    def add_step(self) -> None:
        """After each step."""
        outputs, labels = self._parallel.outputs, labels_of(self._parallel)
        shards = [(one, as_tuple(output), size) for (one, size), output in zip(labels, outputs)]
        with mx.autograd.pause():
            found = [parallel_apply(one.of_shard, shards) for one in self._sets]
        self._later.add_step(functools.partial(self._read, found))

    def _read(self, found: Sequence[Any]) -> None:
        for one, shards in zip(self._sets, found):
            part = one.update(shards)
            if one.of_batches:
                own = [part], self._meeting, self._parallel.batch_axis
                _, batch = kvstore.together(self._store, functools.partial(whole_batch, *own))
                one.update_whole(batch)

    def settle(self) -> None:
        """Read what every step had."""
        self._later.settle()

    def take(self) -> dict[str, float]:
        """The values over the steps of all processes since the last call, as a log names them; all call it."""
        self.settle()
        metrics = [one for some in self._sets for one in some.metrics]
        before = copy.deepcopy([*map(vars, metrics)])

        def merged() -> list[tuple[str, float]]:
            for one, state in zip(metrics, copy.deepcopy(before)):
                vars(one).update(state)  # it may have broken off when some were merged
            for some in self._sets:
                some.merge(self._meeting)
            return [found for some in self._sets for found in some.names_and_values()]

        values = kvstore.together(self._store, merged)
        for one in self._sets:
            one.reset()
        return {_column(name): value for name, value in values}

    def sums(self, is_alone: bool) -> dict[str, list[float]]:
        """What a checkpoint within an epoch has: of all processes, which all call it, or of one that `is_alone`."""
        self.settle()
        for some in self._sets if not is_alone else ():
            some.merge(self._meeting)
        return {_key(one): sums(one) for some in self._sets for one in some.metrics if has_sums(one)}


def _column(name: str) -> str:
    return "train_" + re.sub(r"\W+", "_", name)


def _key(metric: mx.metric.EvalMetric) -> str:
    return f"{type(metric).__name__} {metric.name}"
