"""A net's outputs for all samples of a data set, from all devices and processes, in the data set's order."""

from typing import Any

import numpy as np

from ...compat import mx
from ...compat.array_types import as_tuple, leaves
from ...errors import BatchMismatch
from ...kvstore.collective import gather_objects
from ...metrics.evaluation import run
from ...split import num_samples
from .loaders import LoaderShard


def predict(net: Any, loader: Any, devices: list[mx.Context], store: Any) -> Any:
    """See :meth:`.Training.predict`."""
    if not isinstance(loader, LoaderShard) and store.num_workers > 1:
        raise TypeError(
            f"predict: the loader is a {type(loader).__name__} that every process reads as a whole; hand it to "
            "gp.prepare, and predict with what comes back"
        )
    numbers = loader.numbers() if isinstance(loader, LoaderShard) else None
    has_samples: list[bool] = []  # of each batch: of a small one, the part of some processes is empty

    def inputs():
        for batch in loader:
            found = _inputs(batch)
            has_samples.append(num_samples(found, allow_empty=True) > 0)
            if has_samples[-1]:
                yield (found,)

    def of_shard(shard):
        return _checked(net(*shard), num_samples(shard))

    def concatenate(arrays):
        return np.concatenate([array.asnumpy() for array in arrays])

    outputs = iter([_map(concatenate, shards) for shards in run(of_shard, inputs(), devices)])
    own = [next(outputs) if has else None for has in has_samples]
    everyones = gather_objects(own, store, "training.predict()")
    parts = [part for batch in zip(*everyones) for part in batch if part is not None]
    if not parts:
        raise BatchMismatch("predict: the loader yielded no batch")
    order = None if numbers is None else np.argsort(numbers, kind="stable")
    return _map(lambda arrays: _whole(arrays, order), parts)


def _inputs(batch):
    """The net's inputs of a batch (inputs, labels), (inputs,) or inputs, as a tuple."""
    if isinstance(batch, (tuple, list)):
        if len(batch) not in (1, 2):
            wanted = "expected (inputs, labels), (inputs,) or one array; several inputs are one part: ((a, b), labels)"
            raise ValueError(f"predict: a batch has {len(batch)} parts; {wanted}")
        batch = batch[0]
    return as_tuple(batch)


def _checked(outputs, size):
    """What the net returned for `size` samples, unless an array of it has no row per sample."""
    for where, leaf in leaves(outputs, "outputs"):
        if not isinstance(leaf, mx.nd.NDArray) or leaf.shape[:1] != (size,):
            kind = f"shape {leaf.shape}" if isinstance(leaf, mx.nd.NDArray) else f"type {type(leaf).__name__}"
            raise BatchMismatch(
                f"predict: the net's {where} has {kind} for {size} samples; expected an array with one row per sample: "
                "wrap the net in a block that returns only such"
            )
    return outputs


def _map(function, parts):
    """`function` of the list of arrays at each place of equally nested outputs, nested like them."""
    first = parts[0]
    if isinstance(first, (tuple, list)):
        return type(first)([_map(function, each) for each in zip(*parts)])
    if isinstance(first, dict):
        return {key: _map(function, [part[key] for part in parts]) for key in first}
    return function(parts)


def _whole(arrays, order):
    """One array of those of all batches, its rows in `order`, if any."""
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        found = ", ".join(map(str, sorted(shapes)))
        raise BatchMismatch(
            f"predict: a sample's outputs have the shapes {found} in different batches; pad them to one shape"
        )
    rows = np.concatenate(arrays)
    return rows if order is None else rows[order]
