"""A net's outputs for all samples of a data set, from all devices and processes, in the data set's order."""

from typing import Any

import numpy as np

from ...errors import BatchMismatch
from ...kvstore.collective import gather_objects
from ...metrics.evaluation import run
from ...mxnet.compat import mx
from ...mxnet.compat.array_types import as_tuple, leaves
from ...split import map_aligned, num_samples
from .loaders import LoaderShard


def predict(net: Any, loader: Any, devices: list[mx.Context], store: Any, batch_axis: int = 0) -> Any:
    """See :meth:`.Training.predict`."""
    if not isinstance(loader, LoaderShard) and store.num_workers > 1:
        raise TypeError(
            f"predict: the loader is a {type(loader).__name__} that every process reads as a whole; hand it to "
            "gp.prepare, and predict with what comes back"
        )
    numbers = loader.numbers() if isinstance(loader, LoaderShard) else None

    def inputs():
        for batch in loader:
            found = _inputs(batch)
            yield (found,) if num_samples(found, batch_axis, allow_empty=True) else None

    def of_shard(shard):
        return _checked(net(*shard), num_samples(shard, batch_axis), batch_axis)

    def concatenate(arrays):
        return np.concatenate([array.asnumpy() for array in arrays], axis=batch_axis)

    batches = run(of_shard, inputs(), devices, batch_axis)
    own = [map_aligned(concatenate, shards) if shards else None for shards in batches]
    everyones = gather_objects(own, store, "training.predict()")
    parts = [part for batch in zip(*everyones) for part in batch if part is not None]
    if not parts:
        raise BatchMismatch("predict: the loader yielded no batch")
    order = None if numbers is None else np.argsort(numbers, kind="stable")
    return map_aligned(lambda arrays: _whole(arrays, order, batch_axis), parts)


def _inputs(batch):
    """The net's inputs of a batch (inputs, labels), (inputs,) or inputs, as a tuple."""
    if isinstance(batch, (tuple, list)):
        if len(batch) not in (1, 2):
            wanted = "expected (inputs, labels), (inputs,) or one array; several inputs are one part: ((a, b), labels)"
            raise ValueError(f"predict: a batch has {len(batch)} parts; {wanted}")
        batch = batch[0]
    return as_tuple(batch)


def _checked(outputs, size, batch_axis):
    """What the net returned for `size` samples, unless an array of it has not as many."""
    for where, leaf in leaves(outputs, "outputs"):
        if not isinstance(leaf, mx.nd.NDArray) or leaf.shape[batch_axis : batch_axis + 1] != (size,):
            kind = f"shape {leaf.shape}" if isinstance(leaf, mx.nd.NDArray) else f"type {type(leaf).__name__}"
            wanted = "one row per sample" if batch_axis == 0 else f"the samples along axis {batch_axis}"
            raise BatchMismatch(
                f"predict: the net's {where} has {kind} for {size} samples; expected an array with {wanted}: "
                "wrap the net in a block that returns only such"
            )
    return outputs


def _whole(arrays, order, batch_axis):
    """One array of those of all batches, its samples in `order`, if any."""
    shapes = {array.shape[:batch_axis] + array.shape[batch_axis + 1 :] for array in arrays}
    if len(shapes) > 1:
        found = ", ".join(map(str, sorted(shapes)))
        raise BatchMismatch(
            f"predict: a sample's outputs have the shapes {found} in different batches; pad them to one shape"
        )
    rows = np.concatenate(arrays, axis=batch_axis)
    return rows if order is None else rows.take(order, axis=batch_axis)
