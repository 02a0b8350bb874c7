"""Evaluation of a net over a whole data set, in prediction mode on every device of every process."""

import difflib

import numpy as np

from ..compat import mx
from ..compat.array_types import as_class_of, as_legacy, as_tuple, leaves, widened
from ..device_threads import parallel_apply
from ..errors import BatchMismatch, DeviceUnavailable, NotFinite
from ..kvstore import as_store, collective, separate_training, together
from ..split import as_devices, split_and_load
from .merging import merge


def evaluate(net, loader, metric, devices, store=None, num_real=None):
    """Run `net` over all batches of `loader`, on all devices, and return what `metric` says.

    While the metric reads one batch's results, the devices already work on the next.

    Args:
        net: a Gluon block, initialised on all `devices`. It runs in prediction mode.
        loader: iterable of ``(inputs, labels)``, each an array or a tuple or list of arrays.
        metric: a name such as ``"acc"``, an ``mx.metric.EvalMetric``, a loss, or a list of those, for one pass. It is
            reset first. A loss is one of Gluon's or any function that is called as ``loss(*outputs, *labels)`` and
            returns one value per sample; its value is called ``"loss"`` and is the mean over the samples of all devices
            and processes. Further axes are summed, as in training, and a weight per sample is one more label:
            ``(inputs, (label, weight))``. Several losses have the names of their classes or functions.
        devices: list of ``mx.Context``. A batch with fewer samples than devices uses as many devices as it has samples.
        store: a KVStore through which this process meets the others; the values are then those over all of them, on
            every process. Each must call this function, with its own part of the data.
        num_real: function of a batch's number that says how many samples at its beginning count; the rest are repeated
            ones, as ``gp.sampler.BatchSampler.num_real`` knows. By default all do.

    Returns:
        A list of ``(name, value)``, as ``metric.get_name_value()``, the values as Python floats.

    Raises:
        BatchMismatch: inputs and labels of a batch differ in length, or a loss returns a single value for a batch.
        DeviceUnavailable: the net is not on all `devices`.
        NotFinite: an output of the net is NaN, on the process that has it. Only metrics of your own may take NaN.
        ValueError: the loader yields something else than pairs, or nothing; or there is no such metric.
        TypeError: `store` is a name.

    Example:
        >>> net = mx.gluon.nn.Dense(2, in_units=1)
        >>> net.initialize(mx.init.Zero(), ctx=[mx.cpu(0), mx.cpu(1)])
        >>> data = [(mx.nd.ones((3, 1)), mx.nd.array([0, 0, 1])), (mx.nd.ones((1, 1)), mx.nd.array([0]))]
        >>> values = evaluate(net, data, ["acc", mx.gluon.loss.SoftmaxCELoss()], [mx.cpu(0), mx.cpu(1)])
        >>> [(name, round(value, 4)) for name, value in values]
        [('accuracy', 0.75), ('loss', 0.6931)]
    """
    wanted = _created(metric)
    if store is not None:
        as_store(store, "evaluate")
    losses = [one for one in wanted if isinstance(one, SampleLoss)]
    others = [one for one in wanted if not isinstance(one, SampleLoss)]
    metrics = [one.metric if isinstance(one, SampleLoss) else one for one in wanted]
    # A loss becomes NaN, and MXNet's metrics count NaN as the first class; a user's metric may skip it.
    refuses_nan = bool(losses) or any(type(one).__module__.startswith("mxnet.") for one in others)
    separate_training.note(
        "gp.evaluate",
        store is not None,
        "returns the value over this process's batches (write gp.evaluate(..., store))",
    )
    devices = as_devices(devices)
    check_devices(net, devices, "evaluate")

    def of_shard(inputs, labels):
        outputs = as_tuple(net(*inputs))
        values = [loss.values(outputs, labels, len(inputs[0])) for loss in losses]
        return labels, outputs, values, _with_sums(outputs) if refuses_nan else ()

    def values():
        for one in metrics:
            one.reset()
        for results in run(of_shard, _batches(loader, num_real, may_be_empty=store is not None), devices):
            labels, outputs, values, sums = zip(*results)
            if refuses_nan:
                _refuse_nan(sums)
            if others:
                _update(others, labels, outputs)
            for loss, shards in zip(losses, zip(*values)):
                loss.update(shards)
        if store is not None:
            with collective("gp.evaluate()"):
                merge(mx.metric.CompositeEvalMetric(metrics), store)
        return [(name, float(value)) for one in metrics for name, value in one.get_name_value()]

    return together(store, values, loader)


def _batches(loader, num_real, may_be_empty):
    """(inputs, labels), both tuples, of each batch that has samples; without a store, there must be a batch."""
    index = -1
    for index, batch in enumerate(loader):
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            raise ValueError(f"evaluate: batch {index} is a {type(batch).__name__}; expected a pair (inputs, labels)")
        inputs, labels = as_tuple(batch[0]), as_tuple(batch[1])
        if num_real is not None:
            inputs, labels = ([array[: num_real(index)] for array in arrays] for arrays in (inputs, labels))
        if inputs[0].shape[0] == 0 and (may_be_empty or num_real is not None):
            continue  # a last batch may have fewer samples than there are processes
        yield inputs, labels
    if index < 0 and not may_be_empty:
        raise ValueError("evaluate: the loader yielded no batch")


def _with_sums(outputs):
    """Each array of floats with its sum, which its device computes and which is NaN if one of its values is."""
    arrays = [leaf for _, leaf in leaves(outputs) if isinstance(leaf, mx.nd.NDArray)]
    return [(array, as_legacy(array).sum()) for array in arrays if np.dtype(array.dtype).kind == "f"]


def _refuse_nan(shards):
    """NotFinite: an array of a shard has NaN; a sum alone is NaN also for infinities of both signs."""
    for array, total in (pair for shard in shards for pair in shard):
        if np.isnan(total.asscalar()) and np.isnan(array.asnumpy()).any():
            raise NotFinite(
                f"evaluate: an output of the net, of shape {array.shape} on {array.ctx}, has NaN, so a metric of it "
                "is not right. Either inputs are NaN: look for it in the data by np.isfinite(images).all(). Or weights "
                "are, after NaN in the training data or a learning rate that is too large"
            )


def _update(metrics, labels, outputs):
    """One update per batch, as on one device: some metrics (RMSE, F1) are not the mean of those of the shards."""
    labels, outputs = ([concatenate(shards) for shards in zip(*side)] for side in (labels, outputs))
    for metric in metrics:
        if type(metric).__module__.split(".")[0] in ("mxnet", "gluoncv"):  # which know no mx.np arrays
            metric.update(list(map(as_legacy, labels)), list(map(as_legacy, outputs)))
        else:
            metric.update(labels, outputs)


def run(function, batches, devices):
    """Yield the results of ``function(*shard)`` for each batch, a list by device, while the next one is computed.

    The function is called from the thread of the shard's device. A batch with fewer samples than devices, but at least
    one, uses as many devices as it has samples.
    """
    waiting = None
    for batch in batches:
        shards = split_and_load(batch, devices)
        with mx.autograd.pause(train_mode=False):
            results = parallel_apply(function, shards)
        if waiting is not None:
            yield waiting
        waiting = results
    if waiting is not None:
        yield waiting


def concatenate(shards):
    """One array of the devices' arrays, of their class; the array itself if there is one."""
    if len(shards) == 1:
        return shards[0]
    whole = np.concatenate([shard.asnumpy() for shard in shards])
    return as_class_of(mx.nd.array(whole, dtype=whole.dtype), shards[0])


def check_devices(net, devices, where):
    """Refuse devices that the net's parameters are not on; `where` is the function that was handed them."""
    parameters = net.collect_params().values() if isinstance(net, mx.gluon.Block) else ()
    for parameter in parameters:
        if parameter._data is None and not parameter._deferred_init:  # not initialised: an error only if it is used
            continue
        there = parameter.list_ctx()
        if missing := [device for device in devices if device not in there]:
            raise DeviceUnavailable(
                f"{where}: parameter {parameter.name} is on {there} but not on {missing}; hand over the devices that "
                "the net is on, or write net.collect_params().reset_ctx(devices)"
            )


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


def _created(metric):
    """The metrics that `metric` names, a list in its order of ``mx.metric.EvalMetric`` and :class:`SampleLoss`."""
    wanted = _flat(metric)
    functions = list(filter(_is_function, wanted))
    names = ["loss"] if len(functions) == 1 else list(map(_name, functions))
    losses = map(SampleLoss, functions, names)
    return [next(losses) if _is_function(one) else _from_mxnet(one) for one in wanted]


def _flat(metric):
    if isinstance(metric, (list, tuple)):
        return [one for some in metric for one in _flat(some)]
    return [metric() if isinstance(metric, type) else metric]


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
        return mx.metric.create(metric)
    except AssertionError as error:  # MXNet's own words tell of a registry
        known = sorted(mx.registry.get_registry(mx.metric.EvalMetric))
        close = difflib.get_close_matches(str(metric).lower(), known, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"metric: there is none called {metric!r}; {meant}MXNet has {', '.join(known)}") from error
