"""Metrics of one pass over data, each updated with parts of batches or with whole ones, and merged over processes."""

from ..kvstore import collective
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import as_legacy
from ..split import map_arrays
from .merging import adds_up, merge
from .named import SampleLoss, created
from .whole_batches import joined


class MetricSet:
    """Metrics over the batches of all devices and processes, each merged in its way.

    Sums over samples are updated with this process's parts of batches and added up at the end; others are updated on
    every process with whole batches.

    Args:
        metric: as of :func:`.evaluate`.
        batch_axis: the axis that counts samples.

    Attributes:
        metrics: ``mx.metric.EvalMetric``, in the order of `metric`.
        of_batches: those of them that need whole batches.
        summed: the others.
        refuses_nan: whether NaN among the outputs would be counted.
    """

    def __init__(self, metric, batch_axis=0):
        wanted = created(metric)
        self._losses = [one for one in wanted if isinstance(one, SampleLoss)]
        others = [one for one in wanted if not isinstance(one, SampleLoss)]
        self.metrics = [one.metric if isinstance(one, SampleLoss) else one for one in wanted]
        self._of_parts = [one for one in others if adds_up(one)]
        self.of_batches = [one for one in others if not adds_up(one)]
        self.summed = [*(loss.metric for loss in self._losses), *self._of_parts]
        self._batch_axis = batch_axis
        # A loss becomes NaN, and MXNet's metrics count NaN as the first class; a user's metric may skip it.
        self.refuses_nan = bool(self._losses) or any(type(one).__module__.startswith("mxnet.") for one in others)

    def reset(self):
        for one in self.metrics:
            one.reset()

    def of_shard(self, labels, outputs, size):
        """What :meth:`update` takes of a device with `size` samples, computed there and not waited for; of tuples."""
        return (labels, outputs), [loss.values(outputs, labels, size) for loss in self._losses]

    def update(self, shards):
        """Update sums with the :meth:`of_shard` of each device; returns this process's part of the batch, or None."""
        if not shards:
            return None
        parts, values = zip(*shards)
        for loss, found in zip(self._losses, zip(*values)):
            loss.update(found)
        if len(self._losses) == len(self.metrics):
            return parts[0]
        part = joined(parts, self._batch_axis)
        _update(self._of_parts, part)
        return part

    def update_whole(self, batch):
        """Update the others with a whole batch, see :func:`.whole_batch`; None: nobody had a sample."""
        _update(self.of_batches, batch)

    def merge(self, store):
        """The sums become those of all processes, which all call it."""
        with collective("gp.evaluate()"):
            merge(mx.metric.CompositeEvalMetric(self.summed), store)

    def names_and_values(self):
        """A list of ``(name, value)`` of all."""
        return [(name, float(value)) for one in self.metrics for name, value in _names_and_values(one)]


def _names_and_values(metric):
    found = metric.get_name_value()
    if all(isinstance(name, str) for name, _ in found):
        return found
    return zip(metric.name.split(" & "), metric.get())  # GluonCV's SegmentationMetric returns its two values alone


def _update(metrics, part):
    """One update with labels and outputs, if any: some metrics (RMSE, F1) are not the mean of those of parts."""
    for metric in metrics if part is not None else ():
        labels, outputs = part
        if type(metric).__module__.split(".")[0] in ("mxnet", "gluoncv"):  # which know no mx.np arrays
            labels, outputs = map_arrays(as_legacy, (labels, outputs))
        metric.update(list(labels), list(outputs))
