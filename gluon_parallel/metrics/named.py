"""Metrics by their names, functions or classes, as `evaluate` takes them."""

import difflib
import inspect

import numpy as np

from ..errors import BatchMismatch
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import widened


class SampleLoss:
    """A function that returns one value per sample, as a metric: the mean over the samples.

    Args:
        function: called as ``function(*outputs, *labels)`` on every device, like the loss of ``gp.DataParallel``.
        name: of the value.

    Attributes:
        metric: the ``mx.metric.Loss`` that adds up, over processes too.
    """

    def __init__(self, function, name):
        self.function, self.metric = function, mx.metric.Loss(name)

    def values(self, outputs, labels, size):
        """The loss of a shard of `size` samples, on its device; BatchMismatch: it is not one value per sample."""
        found = self.function(*outputs, *labels)
        if not isinstance(found, (mx.nd.NDArray, np.ndarray)) or found.shape[:1] != (size,):
            kind = f"shape {found.shape}" if hasattr(found, "shape") else f"a {type(found).__name__}"
            raise BatchMismatch(
                f"metric {_name(self.function)}: it returned {kind} for {size} samples; expected an array with one "
                "value per sample (first axis), as Gluon's losses return, because the mean over all samples does not "
                "follow from the values of batches. It is called as function(*outputs, *labels); a function of "
                "(labels, outputs) on NumPy arrays is passed as mx.metric.CustomMetric(function)"
            )
        return found

    def update(self, shards):
        """Add the values of a batch's shards; further axes are summed, as ``loss.backward()`` does."""
        for found in shards:
            values = widened(found.asnumpy() if isinstance(found, mx.nd.NDArray) else found)
            per_sample = values.reshape(len(values), -1).sum(axis=1, dtype=np.float64)
            self.metric.update(None, [mx.nd.array(per_sample, dtype=np.float64)])


def created(metric):
    """The metrics that `metric` names, a list in its order of ``mx.metric.EvalMetric`` and :class:`SampleLoss`."""
    wanted = _flat(metric)
    functions = list(filter(_is_function, wanted))
    names = ["loss"] if len(functions) == 1 else list(map(_name, functions))
    losses = map(SampleLoss, functions, names)
    return [next(losses) if _is_function(one) else one for one in wanted]


def _flat(metric):
    """Functions and metrics, the members of composite ones among them, each of which may be merged in another way."""
    metric = metric() if isinstance(metric, type) else metric
    if not isinstance(metric, (list, tuple)) and not _is_function(metric):
        metric = _from_mxnet(metric)
        if type(metric) is not mx.metric.CompositeEvalMetric:
            return [metric]
        metric = metric.metrics
    return [one for some in metric for one in _flat(some)] if isinstance(metric, (list, tuple)) else [metric]


def _is_function(metric):
    return callable(metric) and not isinstance(metric, mx.metric.EvalMetric)


def _name(function):
    return getattr(function, "__name__", type(function).__name__)


def _from_mxnet(metric):
    if not isinstance(metric, (str, dict, mx.metric.EvalMetric)):
        raise ValueError(
            f"metric: got {type(metric).__name__}; expected a name such as 'acc', an mx.metric.EvalMetric, a loss or a "
            "list of those. The order is evaluate(net, loader, metric, devices, store)"
        )
    try:
        created = mx.metric.create(metric)
    except AssertionError as error:  # MXNet's own words tell of a registry
        known = sorted(mx.registry.get_registry(mx.metric.EvalMetric))
        close = difflib.get_close_matches(str(metric).lower(), known, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"metric: there is none called {metric!r}; {meant}MXNet has {', '.join(known)}") from error
    _check_update(created)
    return created


def _check_update(metric):
    """Refuse a metric whose update takes something else than labels and outputs, as those of boxes do."""
    signature = inspect.signature(metric.update)
    try:
        signature.bind([], [])
    except TypeError:
        kind, given = type(metric).__name__, ", ".join(signature.parameters)
        raise TypeError(
            f"metric {kind}: its update takes ({given}), and evaluate calls update(labels, outputs), two lists of "
            "arrays. Say which of them is what in a class of your own, and evaluate with that: class "
            f"Mine({kind}): def update(self, labels, outputs): classes, scores, boxes = outputs; super().update(...)"
        ) from None
