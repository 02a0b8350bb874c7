"""Evaluation of a net over a whole data set, on every device of every process."""

import difflib

import numpy as np

from ..compat import mx
from ..compat.array_types import as_class_of, as_legacy, as_tuple
from ..device_threads import parallel_apply
from ..errors import DeviceUnavailable
from ..kvstore import as_store, separate_training
from ..split import split_and_load
from .merging import merge


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
        DeviceUnavailable: the net is not on all `devices`.
        ValueError: the loader yields something else than pairs, or nothing; there is no such metric, or it is a loss.
        TypeError: `store` is a name.

    Example:
        >>> net = mx.gluon.nn.Dense(2, in_units=1)
        >>> net.initialize(mx.init.Zero(), ctx=[mx.cpu(0), mx.cpu(1)])
        >>> evaluate(net, [(mx.nd.ones((3, 1)), mx.nd.array([0, 0, 1]))], "acc", [mx.cpu(0), mx.cpu(1)])
        [('accuracy', 0.6666666666666666)]
    """
    metric = _created(metric)
    if store is not None:
        as_store(store, "evaluate")
    metric.reset()
    separate_training.note(
        "gp.evaluate",
        store is not None,
        "returns the value over this process's batches (write gp.evaluate(..., store))",
    )
    _check_devices(net, as_tuple(devices))
    waiting, empty = None, False
    for index, batch in enumerate(loader):
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            raise ValueError(f"evaluate: batch {index} is a {type(batch).__name__}; expected a pair (inputs, labels)")
        inputs, labels = as_tuple(batch[0]), as_tuple(batch[1])
        if num_real is not None:
            inputs, labels = ([array[: num_real(index)] for array in arrays] for arrays in (inputs, labels))
        if inputs[0].shape[0] == 0 and (store is not None or num_real is not None):
            empty = True  # a last batch may have fewer samples than there are processes
            continue
        shards = split_and_load((inputs, labels), devices)
        with mx.autograd.pause(train_mode=False):
            results = parallel_apply(lambda inputs, labels: (labels, as_tuple(net(*inputs))), shards)
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


def _check_devices(net, devices):
    """Refuse devices that the net's parameters are not on."""
    parameters = net.collect_params().values() if isinstance(net, mx.gluon.Block) else ()
    for parameter in parameters:
        if parameter._data is None and not parameter._deferred_init:  # not initialised: an error only if it is used
            continue
        there = parameter.list_ctx()
        if missing := [device for device in devices if device not in there]:
            raise DeviceUnavailable(
                f"evaluate: parameter {parameter.name} is on {there} but not on {missing}; hand over the devices that "
                "the net is on, or write net.collect_params().reset_ctx(devices)"
            )


def _created(metric):
    if isinstance(metric, mx.gluon.loss.Loss):
        raise ValueError(
            f"metric: got the loss {type(metric).__name__}, whose arguments are (output, label); those of a metric are "
            "(labels, outputs), NumPy arrays. Take one of MXNet's by name, such as 'acc' or 'ce', or wrap it: "
            "mx.metric.create(lambda labels, outputs: "
            "float(loss(mx.nd.array(outputs), mx.nd.array(labels)).mean().asscalar()))"
        )
    if isinstance(metric, type) and issubclass(metric, mx.metric.EvalMetric):
        return metric()
    metrics = metric if isinstance(metric, (list, tuple)) else [metric]
    if not all(callable(one) or isinstance(one, (str, dict, mx.metric.EvalMetric)) for one in metrics):
        raise ValueError(
            f"metric: got {type(metric).__name__}; expected a name such as 'acc', an mx.metric.EvalMetric or a list of "
            "those. The order is evaluate(net, loader, metric, devices, store)"
        )
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
    if type(metric).__module__.split(".")[0] in ("mxnet", "gluoncv"):  # which know no mx.np arrays
        labels, outputs = ([as_legacy(array) for array in arrays] for arrays in (labels, outputs))
    metric.update(labels, outputs)


def _joined(shards):
    if len(shards) == 1:
        return shards[0]
    whole = np.concatenate([shard.asnumpy() for shard in shards])
    return as_class_of(mx.nd.array(whole, dtype=whole.dtype), shards[0])
