"""Evaluation of a net over a whole data set, in prediction mode on every device of every process."""

import itertools

import numpy as np

from ..errors import DeviceUnavailable, NotFinite
from ..kvstore import as_store, separate_training, together
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import as_legacy, as_tuple, leaves
from ..mxnet.device_threads import parallel_apply
from ..mxnet.parameters import is_initialized
from ..split import as_devices, first_samples, num_samples, split_and_load, with_arrays
from .metric_set import MetricSet
from .whole_batches import whole_batch


def evaluate(net, loader, metric, devices, store=None, num_real=None, batch_axis=0):
    """Run `net` over all batches of `loader`, on all devices, and return what `metric` says.

    While the metric reads one batch's results, the devices already work on the next. The value does not depend on the
    number of devices and processes. Metrics that are sums over samples, such as accuracy and losses, are added up at
    the end; all others, such as MSE, F1 and your own, are updated on every process with the labels and outputs of
    whole batches, which the processes send to each other.

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
            every process. Each must call this function, with its own part of the data; a batch is what all have of it,
            that of process 0 first.
        num_real: function of a batch's number that says how many samples at its beginning count; the rest are repeated
            ones, as ``gp.sampler.BatchSampler.num_real`` knows. By default all do.
        batch_axis: the axis that counts samples, in inputs, labels and outputs; a loss has one value per sample, (N,).

    Returns:
        A list of ``(name, value)``, as ``metric.get_name_value()``, the values as Python floats.

    Raises:
        BatchMismatch: inputs and labels of a batch differ in length, or a loss returns a single value for a batch; or,
            for metrics on several devices or processes, the net returns something else than arrays of samples.
        DeviceUnavailable: the net is not on all `devices`.
        NotFinite: an output of the net is NaN, on the process that has it. Only metrics of your own may take NaN.
        ValueError: the loader yields something else than pairs, or nothing; or there is no such metric.
        TypeError: `store` is a name; or the metric's update takes something else than labels and outputs.

    Example:
        >>> net = mx.gluon.nn.Dense(2, in_units=1)
        >>> net.initialize(mx.init.Zero(), ctx=[mx.cpu(0), mx.cpu(1)])
        >>> data = [(mx.nd.ones((3, 1)), mx.nd.array([0, 0, 1])), (mx.nd.ones((1, 1)), mx.nd.array([0]))]
        >>> values = evaluate(net, data, ["acc", mx.gluon.loss.SoftmaxCELoss()], [mx.cpu(0), mx.cpu(1)])
        >>> [(name, round(value, 4)) for name, value in values]
        [('accuracy', 0.75), ('loss', 0.6931)]
    """
    metrics = MetricSet(metric, batch_axis)
    if store is not None:
        as_store(store, "evaluate")
    separate_training.note(
        "gp.evaluate",
        store is not None,
        "returns the value over this process's batches (write gp.evaluate(..., store))",
    )
    devices = as_devices(devices)
    check_devices(net, devices, "evaluate")

    def of_shard(inputs, labels):
        outputs = as_tuple(net(*inputs))
        found = metrics.of_shard(labels, outputs, num_samples(inputs, batch_axis))
        return found, _with_sums(outputs) if metrics.refuses_nan else ()

    def parts():
        """Labels and outputs of this process's part of each batch, which sums have counted; None: it has no samples."""
        batches = _batches(loader, num_real, batch_axis, may_be_empty=store is not None)
        for results in run(of_shard, batches, devices, batch_axis):
            _refuse_nan(sums for _, sums in results)
            yield metrics.update([found for found, _ in results])

    def values():
        metrics.reset()
        found = parts()
        has_more = True
        while has_more:
            own = list(itertools.islice(found, 1))  # a part, or nothing behind the last one
            has_more = bool(own)
            if metrics.of_batches:
                has_more, batch = whole_batch(own, store, batch_axis)
                metrics.update_whole(batch)
        if store is not None:
            metrics.merge(store)
        return metrics.names_and_values()

    return together(store, values, loader)


def _batches(loader, num_real, batch_axis, may_be_empty):
    """(inputs, labels), both tuples, of each batch, or None: it has no samples; without a store, there must be some."""
    index = -1
    for index, batch in enumerate(loader):
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            raise ValueError(f"evaluate: batch {index} is a {type(batch).__name__}; expected a pair (inputs, labels)")
        batch = as_tuple(with_arrays(batch[0])), as_tuple(with_arrays(batch[1]))
        may_have_none = may_be_empty or num_real is not None  # a last batch may have fewer samples than processes
        num = num_samples(batch, batch_axis, may_have_none, names=("inputs", "labels"))
        real = num if num_real is None else min(num_real(index), num)
        yield None if real == 0 else batch if real == num else first_samples(batch, real, batch_axis)
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


def run(function, batches, devices, batch_axis=0):
    """Yield the results of ``function(*shard)`` for each batch, a list by device, while the next one is computed.

    The function is called from the thread of the shard's device. A batch with fewer samples than devices uses as many
    devices as it has samples, and one that is None has no results.
    """
    waiting: list = []
    for batch in batches:
        shards = split_and_load(batch, devices, batch_axis) if batch is not None else []
        with mx.autograd.pause(train_mode=False):
            results = parallel_apply(function, shards) if shards else []
        yield from waiting
        waiting = [results]
    yield from waiting


def check_devices(net, devices, where):
    """Refuse devices that the net's parameters are not on; `where` is the function that was handed them."""
    parameters = net.collect_params().values() if isinstance(net, mx.gluon.Block) else ()
    for parameter in parameters:
        if not is_initialized(parameter):  # not initialised: an error only if it is used
            continue
        there = parameter.list_ctx()
        if missing := [device for device in devices if device not in there]:
            raise DeviceUnavailable(
                f"{where}: parameter {parameter.name} is on {there} but not on {missing}; hand over the devices that "
                "the net is on, or write net.collect_params().reset_ctx(devices)"
            )
