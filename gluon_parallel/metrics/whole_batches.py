"""Whole batches, made of the parts that devices and processes have of them."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

import numpy as np

from ..errors import BatchMismatch
from ..kvstore.collective import gather_objects
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import Nested, leaves
from ..split import map_arrays


def whole_batches(parts: Iterator[Optional[Nested]], store: Any, batch_axis: int) -> Iterator[Optional[Nested]]:
    """Each batch on every process, made of the parts that all have of it; all processes call it.

    Args:
        parts: of this process, nested arrays of MXNet; None where it has no sample of a batch. Where it has fewer
            batches than others, it has no samples of theirs.
        store: through which the processes meet; None: this process is alone.
        batch_axis: along which parts are put together, that of process 0 first.
    """
    if store is None or store.num_workers == 1:
        yield from parts
        return
    while True:
        own = list(itertools.islice(parts, 1))  # a part, or nothing behind the last one
        is_current = [isinstance(leaf, mx.np.ndarray) for _, leaf in leaves(own)]
        values = map_arrays(lambda array: array.asnumpy(), own)
        everyones = gather_objects((values, is_current), store, "gp.evaluate()")
        if not any(values for values, _ in everyones):
            return
        found = [(values[0], kinds) for values, kinds in everyones if values and values[0] is not None]
        yield _whole([part for part, _ in found], batch_axis, found[0][1]) if found else None


def joined(shards: Sequence[Nested], batch_axis: int) -> Nested:
    """This process's part of a batch, made of its devices' parts, nested arrays of MXNet; itself if one has it."""
    if len(shards) == 1:
        return shards[0]
    for where, leaf in leaves(shards[0], "(labels, outputs)"):
        if not isinstance(leaf, mx.nd.NDArray):
            raise BatchMismatch(
                f"evaluate: {where} is a {type(leaf).__name__} of each device, not an array that can be put together; "
                "have the net return arrays alone, or evaluate on one device"
            )
    is_current = [isinstance(leaf, mx.np.ndarray) for _, leaf in leaves(shards[0])]
    return _whole(map_arrays(lambda array: array.asnumpy(), list(shards)), batch_axis, is_current)


def _whole(parts: Sequence[Nested], batch_axis: int, is_current: Sequence[bool]) -> Nested:
    """Nested arrays of MXNet, of those of NumPy that parts have; `is_current`: which of them are ``mx.np`` arrays."""
    kinds = iter(is_current)

    def whole(arrays: Sequence[np.ndarray]) -> Any:
        values, is_numpy = arrays[0], next(kinds)
        if len(arrays) > 1:
            try:
                values = np.concatenate(arrays, axis=batch_axis)
            except ValueError as error:
                shapes = ", ".join(str(array.shape) for array in arrays)
                raise BatchMismatch(
                    f"evaluate: parts of a batch have labels or outputs of the shapes {shapes}, which do not fit "
                    f"together along axis {batch_axis}, that of the samples; pad them to one shape"
                ) from error
        array = mx.nd.array(values, dtype=values.dtype)
        return array.as_np_ndarray() if is_numpy else array

    return at_each_place(whole, parts)


def at_each_place(function: Callable[[list], Any], parts: Sequence[Nested]) -> Nested:
    """`function` of the list of what stands at each place of equally nested parts, nested like them."""
    first = parts[0]
    if isinstance(first, dict):
        return {key: at_each_place(function, [part[key] for part in parts]) for key in first}
    if not isinstance(first, (tuple, list)):
        return function(list(parts))
    found = [at_each_place(function, each) for each in zip(*parts)]
    return type(first)(*found) if hasattr(first, "_fields") else type(first)(found)
