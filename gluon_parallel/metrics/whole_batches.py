"""Whole batches, made of the parts that devices and processes have of them."""

from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from ..errors import BatchMismatch
from ..kvstore.collective import gather_objects
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import Nested, leaves
from ..split import map_aligned, map_arrays


def whole_batch(own: Sequence[Optional[Nested]], store: Any, batch_axis: int) -> tuple[bool, Optional[Nested]]:
    """Whether any process has a further batch, and that batch, made of the parts that all have of it; all call it.

    Args:
        own: this process's part, nested arrays of MXNet, or None where it has no sample of the batch; in a list, which
            is empty behind its last batch.
        store: through which the processes meet; None: this process is alone.
        batch_axis: along which parts are put together, that of process 0 first.
    """
    if store is None or store.num_workers == 1:
        return bool(own), next(iter(own), None)
    problem = _problem(own, batch_axis)
    values = [] if problem else map_arrays(lambda array: array.asnumpy(), list(own))
    everyones = gather_objects((values, _are_current(own), problem), store, "gp.evaluate()")
    for _, _, said in everyones:
        if said:  # on all processes, which would wait for each other otherwise
            raise BatchMismatch(said)
    found = [(values[0], are_current) for values, are_current, _ in everyones if values and values[0] is not None]
    batch = _whole([part for part, _ in found], batch_axis, found[0][1]) if found else None
    return any(values for values, *_ in everyones), batch


def joined(shards: Sequence[Nested], batch_axis: int) -> Nested:
    """This process's part of a batch, made of its devices' parts, nested arrays of MXNet; itself if one has it."""
    if len(shards) == 1:
        return shards[0]
    if problem := _problem(shards, batch_axis):
        raise BatchMismatch(problem)
    arrays = map_arrays(lambda array: array.asnumpy(), list(shards))
    return _whole(arrays, batch_axis, _are_current(shards[:1]))


def _problem(parts: Sequence[Optional[Nested]], batch_axis: int) -> Optional[str]:
    """What is no array of samples in one of these parts, each (labels, outputs)."""
    for part in filter(None, parts):
        named = [found for name, side in zip(("labels", "outputs"), part) for found in leaves(side, name)]
        sizes = [getattr(leaf, "shape", ())[batch_axis : batch_axis + 1] for _, leaf in named]
        for (where, leaf), size in zip(named, sizes):
            is_array = isinstance(leaf, mx.nd.NDArray)
            if not is_array or size != sizes[0] or not size:
                return (
                    f"evaluate: {where} of a device or process is "
                    f"{f'an array of shape {leaf.shape}' if is_array else f'a {type(leaf).__name__}'}, which cannot be "
                    f"put together along axis {batch_axis}, that of the samples; have the net return arrays of samples "
                    "alone, or evaluate on one device of one process"
                )
    return None


def _are_current(parts: Sequence[Optional[Nested]]) -> list[bool]:
    """Which leaves of parts are ``mx.np`` arrays."""
    return [isinstance(leaf, mx.np.ndarray) for _, leaf in leaves(list(parts))]


def _whole(parts: Sequence[Nested], batch_axis: int, are_current: Sequence[bool]) -> Nested:
    """Nested arrays of MXNet, of those of NumPy that parts have; `are_current`: which of them are ``mx.np`` arrays."""
    kinds = iter(are_current)

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

    return map_aligned(whole, parts)
