"""Metrics over a whole data set, computed on every device of every process."""

import difflib

import numpy as np

from .compat import mx
from .errors import BatchMismatch
from .exchange import Exchange
from .split import split_and_load

_BLOCK = 8192  # values that travel in one exchange

# What these metrics know is a sum and a count, which add up over processes (a mean over batches stays one).
_SUMS = ("Accuracy", "TopKAccuracy", "Perplexity", "MAE", "MSE", "RMSE", "CrossEntropy", "NegativeLogLikelihood",
         "Loss", "Torch", "Caffe", "CustomMetric")  # fmt: skip
_COUNTERS = ("true_positives", "true_negatives", "false_positives", "false_negatives")


def _as_list(data):
    return list(data) if isinstance(data, (list, tuple)) else [data]


def evaluate(net, loader, metric, devices, store=None, num_real=None):
    """Run `net` over all batches of `loader`, on all devices, and return what `metric` says.

    While the metric reads one batch's results, the devices already work on the next.

    Args:
        net: a Gluon block, initialised on all `devices`. It runs in prediction mode.
        loader: iterable of ``(inputs, labels)``, each an array or a tuple or list of arrays.
        metric: an ``mx.metric.EvalMetric``, or what ``mx.metric.create`` makes one of (``"acc"``, a function, a list).
            It is reset first.
        devices: list of ``mx.Context``. A batch with fewer samples than devices uses as many devices as it has samples.

        store: a KVStore through which this process meets the others; the values are then those over all of them, on
            every process. Each must call this function, with its own part of the data.
        num_real: function of a batch's number that says how many samples at its beginning count; the rest are repeated
            ones, as ``gp.sampler.BatchSampler.num_real`` knows. By default all do.

    Returns:
        A list of ``(name, value)``, as ``metric.get_name_value()``, the values as Python floats.

    Raises:
        BatchMismatch: inputs and labels of a batch differ in length.
        ValueError: the loader yields something else than pairs, or nothing; or there is no such metric.

    Example:
        >>> net = mx.gluon.nn.Dense(2, in_units=1)
        >>> net.initialize(mx.init.Zero(), ctx=[mx.cpu(0), mx.cpu(1)])
        >>> evaluate(net, [(mx.nd.ones((3, 1)), mx.nd.array([0, 0, 1]))], "acc", [mx.cpu(0), mx.cpu(1)])
        [('accuracy', 0.6666666666666666)]
    """
    metric = _created(metric)
    metric.reset()
    waiting, empty = None, False
    for index, batch in enumerate(loader):
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            raise ValueError(f"evaluate: batch {index} is a {type(batch).__name__}; expected a pair (inputs, labels)")
        inputs, labels = _as_list(batch[0]), _as_list(batch[1])
        if num_real is not None:
            inputs, labels = ([array[: num_real(index)] for array in arrays] for arrays in (inputs, labels))
            if inputs[0].shape[0] == 0:
                empty = True
                continue
        shards = split_and_load((inputs, labels), devices)
        with mx.autograd.pause(train_mode=False):
            results = [(shard_labels, _as_list(net(*shard_inputs))) for shard_inputs, shard_labels in shards]
        if waiting is not None:
            _update(metric, waiting)
        waiting = results
    if waiting is not None:
        _update(metric, waiting)
    elif store is None and not empty:
        raise ValueError("evaluate: the loader yielded no batch")
    if store is not None:
        merge(metric, store)
    return [(name, float(value)) for name, value in metric.get_name_value()]


def _created(metric):
    try:
        return mx.metric.create(metric)
    except AssertionError as error:  # MXNet's own words tell of a registry
        known = sorted(mx.registry.get_registry(mx.metric.EvalMetric))
        close = difflib.get_close_matches(str(metric).lower(), known, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"metric: there is none called {metric!r}; {meant}MXNet has {', '.join(known)}") from error


def _update(metric, results):
    """One update per batch, as on one device: some metrics (RMSE, F1) are not the mean of those of the shards."""
    labels, outputs = ([_joined(shards) for shards in zip(*side)] for side in zip(*results))
    metric.update(labels, outputs)


def _joined(shards):
    if len(shards) == 1:
        return shards[0]
    whole = np.concatenate([shard.asnumpy() for shard in shards])
    return mx.nd.array(whole, dtype=whole.dtype)


def merge(metric, store):
    """Make a metric say what it would have said over the data of all processes, on each of them.

    Every process calls it, once, after its last ``metric.update``; then ``metric.get()``.

    Args:
        metric: an ``mx.metric.EvalMetric`` that counts (accuracy, losses, F1, ...), or a composite one of such.
        store: a KVStore that sums.

    Returns:
        The metric.

    Raises:
        ValueError: the metric's values cannot be added up (area under a curve, correlations, metrics of your own): use
            :func:`gather` on labels and scores, and update the metric with what it returns.

    Example:
        >>> metric = mx.metric.Accuracy()
        >>> metric.update([mx.nd.array([0, 1])], [mx.nd.array([0, 0])])
        >>> merge(metric, mx.kv.create("local")).get()
        ('accuracy', 0.5)
    """
    places = [place for one in _flatten(metric) for place in _state(one)]
    own = np.array([float(getattr(holder, name)) for holder, name in places])
    total = _exchange(store, len(own)).gather(0, own).sum(axis=0)
    for (holder, name), value in zip(places, total):
        kind = type(getattr(holder, name))
        setattr(holder, name, int(value) if issubclass(kind, (int, np.integer)) else float(value))
    for one in _flatten(metric):
        counts = _counts(one)
        if counts is not None:  # whose value is made of the counts
            score = counts.fscore if type(one).__name__ == "F1" else counts.matthewscc()
            one.num_inst, one.sum_metric = counts.total_examples, score * counts.total_examples
    return metric


def _flatten(metric):
    if isinstance(metric, mx.metric.CompositeEvalMetric):
        return [one for part in metric.metrics for one in _flatten(part)]
    return [metric]


def _counts(metric):
    """The counts behind an F1 or MCC over all samples, else None."""
    kind = type(metric).__name__
    if kind == "F1" and metric.average != "macro":
        return metric.metrics
    if kind == "MCC" and metric._average != "macro":
        return metric._metrics
    return None


def _state(metric):
    """(object, attribute) of each number that adds up."""
    counts = _counts(metric)
    if counts is not None:
        return [(counts, name) for name in _COUNTERS]
    if type(metric).__name__ not in (*_SUMS, "F1", "MCC") or type(metric).__module__ != mx.metric.__name__:
        raise ValueError(
            f"metrics: what {type(metric).__name__} knows cannot be added up over processes; gather the labels and the "
            "scores with gp.metrics.gather(array, store), and update the metric with those"
        )
    names = ("sum_metric", "num_inst", "global_sum_metric", "global_num_inst")
    return [(metric, name) for name in names if hasattr(metric, name)]


def gather(array, store):
    """The rows of all processes' arrays, those of rank 0 first; on every process.

    Args:
        array: (n, ...) NumPy array or NDArray, of any n (also 0) but otherwise alike on every process.
        store: a KVStore that sums.

    Returns:
        (N, ...) NumPy array.

    Raises:
        BatchMismatch: the arrays differ in more than their length.

    Example:
        >>> gather(np.array([0.5, 0.25]), mx.kv.create("local")).tolist()
        [0.5, 0.25]
    """
    array = array.asnumpy() if hasattr(array, "asnumpy") else np.asarray(array)
    flat = array.astype(np.float64).reshape(-1)
    width = int(np.prod(array.shape[1:]))
    sizes = _exchange(store, 2).gather(0, np.array([flat.size, width], np.float64)).astype(int)
    if len(set(sizes[:, 1])) > 1:
        raise BatchMismatch(f"gather: rows have {sizes[:, 1].tolist()} values on the processes; expected the same")
    parts = [np.empty(0)] * len(sizes)
    blocks = _exchange(store, _BLOCK)
    for number, begin in enumerate(range(0, sizes[:, 0].max(), _BLOCK)):
        block = np.zeros(_BLOCK)
        own = flat[begin : begin + _BLOCK]
        block[: own.size] = own
        parts = [np.concatenate(pair) for pair in zip(parts, blocks.gather(number, block))]
    rows = [part[:size].reshape(-1, *array.shape[1:]) for part, (size, _) in zip(parts, sizes)]
    return np.concatenate(rows).astype(array.dtype)


def _exchange(store, length):
    """One exchange per store and length; the processes make them in the same order."""
    known = vars(store).setdefault("_metric_exchanges", {})
    if length not in known:
        known[length] = Exchange(store, "gp.metrics")
        known[length].prepare(length)
    return known[length]
