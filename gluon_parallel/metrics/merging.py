"""Merge metrics, or gather arrays, over all processes."""

import functools

import numpy as np

from ..errors import BatchMismatch
from ..kvstore import as_store, collective
from ..kvstore.collective import gather, gather_objects
from ..mxnet.compat import mx
from ..mxnet.metrics import mcc_average, mcc_counts
from .coco import COCOMeanAP

# What these metrics of MXNet know is a sum over samples, and their number, which add up however a batch is divided.
# Others, as MSE, are means over calls of update.
_SUMS = ("Accuracy", "TopKAccuracy", "Perplexity", "CrossEntropy", "NegativeLogLikelihood", "Loss", "Torch", "Caffe")
_KNOWN = ("gluoncv", "gluon_parallel", "mxnet")
_COUNTERS = ("true_positives", "true_negatives", "false_positives", "false_negatives")


@collective("gp.metrics.merge()")
def merge(metric, store):
    """The metric, changed so that it says on each process what it would have said over the data of all processes.

    Every process calls it, once, after its last ``metric.update``; then ``metric.get()``. ``gp.evaluate`` needs it not.

    Args:
        metric: an ``mx.metric.EvalMetric`` that is a mean over samples (Accuracy, TopKAccuracy, CrossEntropy, Loss,
            ...); F1 or MCC with ``average="micro"``; GluonCV's VOCMApMetric, VOC07MApMetric or SegmentationMetric;
            :class:`COCOMeanAP`; or a composite one of such.
        store: a KVStore that sums.

    Raises:
        ValueError: what the metric knows does not add up over parts of batches: means over calls of update (MAE, MSE,
            RMSE, F1 and MCC as they are by default, CustomMetric), correlations, metrics of your own. ``gp.evaluate``
            takes them; or use :func:`gather_rows` on the labels and outputs of each batch, and update with those.

    Example:
        >>> metric = mx.metric.Accuracy()
        >>> metric.update([mx.nd.array([0, 1])], [mx.nd.array([0, 0])])
        >>> merge(metric, mx.kv.create("local")).get()
        ('accuracy', 0.5)
    """
    rules = [(one, _rule(one)) for one in _flatten(metric)]
    adding = [one for one, rule in rules if rule is None]
    numbers = [sums(one) for one in adding]  # a metric that is refused is so before any exchange
    own = np.array([value for some in numbers for value in some])
    total = gather(as_store(store, "gp.metrics"), "gp.metrics.merge()", own).sum(axis=0).tolist() if adding else []
    for one, some in zip(adding, numbers):
        set_sums(one, [total.pop(0) for _ in some])
    for one, rule in rules:
        if rule is not None:
            rule(one, functools.partial(gather_rows, store=store))
    return metric


def has_sums(metric):
    """Whether a metric follows from :func:`sums`."""
    return _rule(metric) is None and adds_up(metric)


def sums(metric):
    """The numbers behind a metric, as floats, which add up over parts of the data; ValueError: there are none."""
    return [float(getattr(holder, name)) for holder, name in _state(metric)]


def set_sums(metric, values):
    """Have a metric say what follows from these numbers."""
    for (holder, name), value in zip(_state(metric), values):
        setattr(holder, name, int(value) if isinstance(getattr(holder, name), (int, np.integer)) else float(value))
    counts = _counts(metric)
    if counts is not None:  # whose value is made of the counts
        is_f1 = type(metric) is mx.metric.F1
        score = counts.fscore if is_f1 else counts.matthewscc()
        of_all = counts.global_fscore if is_f1 else counts.matthewscc(use_global=True)
        metric.num_inst, metric.sum_metric = counts.total_examples, score * counts.total_examples
        num = metric.global_num_inst = counts.global_total_examples
        metric.global_sum_metric = of_all * num


def _rule(metric):
    """How a metric that does not add up is merged, or None; GluonCV's are known by name, for it may not be there."""
    if isinstance(metric, COCOMeanAP):
        return COCOMeanAP.merge
    names = [base.__name__ for base in type(metric).__mro__ if base.__module__.startswith("gluoncv.")]
    return next((rule for name, rule in _RULES.items() if name in names), None)


def _merge_average_precision(metric, gather_rows):
    """The records of all processes in an order that does not depend on which process had which image.

    An average precision depends on the order in which it takes equal scores. Here those that are right and those that
    are wrong are mixed evenly, so that a detector which gives everything the same score gains nothing by it.
    """
    positives = gather_rows(np.array(list(metric._n_pos.items()), np.float64).reshape(-1, 2))
    classes = [np.full(len(scores), label) for label, scores in metric._score.items()]
    own = [np.concatenate([[], *values]) for values in (classes, metric._score.values())]
    matches = np.concatenate([[], *(metric._match[label] for label in metric._score)])
    records = gather_rows(np.column_stack([*own, matches]))
    records = records[np.lexsort(records.T[::-1])]  # by class, then score, then match
    _, which, sizes = np.unique(records, axis=0, return_inverse=True, return_counts=True)
    which = which.reshape(-1)  # some versions of NumPy give it two dimensions
    within = np.arange(len(records)) - (np.cumsum(sizes) - sizes)[which]  # the how-manieth of those that are alike
    records = records[np.lexsort(((within + 0.5) / sizes[which], records[:, 1], records[:, 0]))]
    for label in np.unique(positives[:, 0]):
        chosen = records[records[:, 0] == label]
        metric._n_pos[int(label)] = int(positives[positives[:, 0] == label, 1].sum())
        metric._score[int(label)], metric._match[int(label)] = chosen[:, 1].tolist(), chosen[:, 2].tolist()


def _merge_pixels(metric, gather_rows):
    """Pixels right, pixels in all, and per class the intersection and the union: all of them add up."""
    shape = (1, metric.nclass)
    single = gather_rows(np.array([[metric.total_correct, metric.total_label]], np.int64)).sum(axis=0)
    metric.total_correct, metric.total_label = single.tolist()
    for name in ("total_inter", "total_union"):  # 0 before the first batch, then an array
        setattr(metric, name, gather_rows(np.broadcast_to(getattr(metric, name), shape).astype(np.int64)).sum(axis=0))


_RULES = {"VOCMApMetric": _merge_average_precision, "SegmentationMetric": _merge_pixels}


def _flatten(metric):
    if isinstance(metric, mx.metric.CompositeEvalMetric):
        return [one for part in metric.metrics for one in _flatten(part)]
    return [metric]


def adds_up(metric):
    """Whether parts of batches, merged, make what whole batches would have made, to rounding."""
    kind = type(metric)
    is_sum = kind.__module__ == mx.metric.__name__ and kind.__name__ in _SUMS
    # One that has a `get` of its own, say for the values of single images, may know more than what is merged.
    is_known = all(function.__module__.partition(".")[0] in _KNOWN for function in (kind.get, kind.get_name_value))
    return is_sum or _counts(metric) is not None or (is_known and _rule(metric) is not None)


def _counts(metric):
    """The counts behind an F1 or MCC over all samples, else None."""
    if type(metric) is mx.metric.F1 and metric.average != "macro":
        return metric.metrics
    if type(metric) is mx.metric.MCC and mcc_average(metric) != "macro":
        return mcc_counts(metric)
    return None


def _state(metric):
    """(object, attribute) of each number that adds up."""
    if not adds_up(metric):
        raise ValueError(
            f"metrics: what {type(metric).__name__} knows cannot be added up over processes, of which each has updated "
            "it with its parts of batches; evaluate with gp.evaluate(net, loader, metric, devices, store), which "
            "updates it with whole ones. Or gather the labels and the outputs of each batch, mx.nd.array("
            "gp.metrics.gather_rows(array, store)), and update the metric with those"
        )
    counts = _counts(metric)
    if counts is not None:
        return [(counts, scope + name) for scope in ("", "global_") for name in _COUNTERS]
    names = ("sum_metric", "num_inst", "global_sum_metric", "global_num_inst")
    return [(metric, name) for name in names if hasattr(metric, name)]


def gather_rows(array, store):
    """The rows of all processes' arrays as a NumPy array (N, ...), those of rank 0 first; on every process.

    Args:
        array: (n, ...) NumPy array or NDArray, of any n (also 0) but otherwise alike on every process.
        store: a KVStore that sums.

    Raises:
        BatchMismatch: the arrays differ in more than their length.

    Example:
        >>> gather_rows(np.array([0.5, 0.25]), mx.kv.create("local")).tolist()
        [0.5, 0.25]
    """
    array = np.asarray(array)
    rows = gather_objects(array, as_store(store, "gp.metrics"), "gp.metrics.gather_rows()")
    widths = [int(np.prod(part.shape[1:])) for part in rows]
    if len(set(widths)) > 1:
        raise BatchMismatch(f"gather_rows: rows have {widths} values on the processes; expected the same")
    return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in rows]).astype(array.dtype)
