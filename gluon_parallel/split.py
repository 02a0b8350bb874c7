"""Split of a batch into one shard per device, and of items over processes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from .compat import mx
from .compat.array_types import Nested, as_current, leaves, to_device
from .engine import copy_to_device, pinned_memory
from .errors import BatchMismatch, DeviceUnavailable

_NUMPY_DTYPES = {np.float16, np.float32, np.float64, np.uint8, np.int8, np.int32, np.int64, np.bool_}


def map_arrays(function: Callable[[Any], Any], data: Nested) -> Nested:
    """The same nesting of tuples, lists and dicts with `function` applied to every array; what else it has stays."""
    if isinstance(data, (mx.nd.NDArray, np.ndarray)):
        return function(data)
    if isinstance(data, dict):
        mapped = copy.copy(data)  # also a defaultdict, whose constructor takes other arguments
        mapped.update((key, map_arrays(function, value)) for key, value in data.items())
        return mapped
    if not isinstance(data, (tuple, list)):
        return data
    parts = [map_arrays(function, value) for value in data]
    return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)


def num_samples(data: Nested, batch_axis: int = 0, allow_empty: bool = False) -> int:
    """How many samples a (nested) batch holds.

    Args:
        data, batch_axis: as of :func:`split_and_load`.
        allow_empty: return 0 for a batch without samples: the share of some processes of a very small batch.

    Raises:
        BatchMismatch: its arrays disagree, one has no such axis, or there is no array or no sample at all.

    Example:
        >>> num_samples((np.zeros((6, 3)), np.zeros(6)))
        6
    """
    if not isinstance(batch_axis, (int, np.integer)) or batch_axis < 0:
        raise BatchMismatch(
            f"batch_axis is {batch_axis!r}; expected a whole number, counted from the front, which means the same for "
            "every array"
        )
    lengths: dict[str, int] = {}
    for where, array in leaves(data):
        if not isinstance(array, (mx.nd.NDArray, np.ndarray)):
            raise BatchMismatch(
                f"{where} is a {type(array).__name__}; a batch is an NDArray, a NumPy array, or a tuple, list or dict "
                "of those. Plain numbers become an array by numpy.asarray(...)"
            )
        if array.ndim <= batch_axis:
            raise BatchMismatch(f"{where} has shape {array.shape}, so there is no axis {batch_axis} to split along")
        lengths[where] = array.shape[batch_axis]
    if not lengths:
        raise BatchMismatch("the batch holds no array")
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{where} has {length}" for where, length in lengths.items())
        raise BatchMismatch(f"the parts of a batch differ in their number of samples (axis {batch_axis}): {found}")
    where, length = next(iter(lengths.items()))
    if length == 0 and not allow_empty:
        raise BatchMismatch(f"{where} has no samples; leave an empty batch out")
    return length


def shard_bounds(size: int, rank: int, num_workers: int) -> tuple[int, int]:
    """Begin and end of one process's shard of `size` items; the shards differ by one item at most.

    Example:
        >>> [shard_bounds(7, rank, 3) for rank in range(3)]
        [(0, 2), (2, 4), (4, 7)]
    """
    return size * rank // num_workers, size * (rank + 1) // num_workers


def shard_sizes(num: int, num_shards: int) -> list[int]:
    """Sizes of at most `num_shards` non-empty parts of `num` samples that differ by at most one, larger ones first.

    Example:
        >>> shard_sizes(7, 3), shard_sizes(2, 3)
        ([3, 2, 2], [1, 1])
    """
    quotient, remainder = divmod(num, num_shards)
    sizes = [quotient + (index < remainder) for index in range(num_shards)]
    return [size for size in sizes if size]


def _to_device(array: mx.nd.NDArray | np.ndarray, device: mx.Context) -> mx.nd.NDArray:
    """A NumPy or NDArray piece on `device`."""
    if isinstance(array, mx.nd.NDArray):
        return to_device(array, device)
    if array.dtype.type not in _NUMPY_DTYPES:
        raise BatchMismatch(
            f"the batch holds an array of dtype {array.dtype}, which MXNet does not have; convert it, for instance by "
            "array.astype('float32') or array.astype('int32')"
        )
    # float64 is what NumPy makes by default and float32 what Gluon nets are made of; mx.nd.array converts likewise
    dtype = np.float32 if array.dtype == np.float64 else array.dtype
    memory = pinned_memory(device)
    if memory is None or not array.ndim or not array.size:
        return as_current(mx.nd.array(array, ctx=device, dtype=dtype))
    return as_current(copy_to_device(array.astype(dtype, copy=False), device, memory))


def split_and_load(
    data: Nested, devices: Sequence[mx.Context] | mx.Context, batch_axis: int = 0, even_split: bool = False
) -> list[Nested]:
    """Cut a batch along `batch_axis` and put one shard on each device.

    Takes what ``gluon.utils.split_and_load`` takes, in the same positions, and more: nested batches, fewer samples
    than devices, and uneven sizes by default. A shard that already is where it belongs is a view, not a copy.

    Args:
        data: an NDArray or NumPy array, or a (nested) tuple, list or dict of them, with the same number of samples.
            float64 NumPy arrays arrive as float32, as with ``mx.nd.array``; every other dtype stays.
        devices: list of ``mx.Context``, see :func:`gluon_parallel.devices`.
        batch_axis: the axis that counts samples.
        even_split: refuse a batch that does not divide evenly.

    Returns:
        A list of shards, each nested like `data`; their sizes differ by at most one and add up to the batch. With
        fewer samples than devices there are only as many shards as samples.

    Raises:
        BatchMismatch: the batch is empty, its parts differ in length, or `even_split` cannot be had.
        DeviceUnavailable: `devices` is a word such as ``"cpu:2"``; :func:`gluon_parallel.devices` reads those.

    Example:
        >>> shards = split_and_load(np.arange(5), [mx.cpu(0), mx.cpu(1)])
        >>> [shard.asnumpy().tolist() for shard in shards]
        [[0, 1, 2], [3, 4]]
    """
    refuse_word(devices)
    devices = [devices] if isinstance(devices, mx.Context) else list(devices)
    if not devices:
        raise BatchMismatch("split_and_load got an empty list of devices")
    num = num_samples(data, batch_axis)
    if even_split and num % len(devices):
        raise BatchMismatch(
            f"{num} samples do not divide evenly over {len(devices)} devices; use even_split=False, "
            "or a batch size that is a multiple of the number of devices"
        )
    if len(devices) == 1:  # whole arrays need no slice, which under autograd.record() would be an operator
        return [map_arrays(lambda array: _to_device(array, devices[0]), data)]
    sizes = shard_sizes(num, len(devices))
    ends = itertools.accumulate(sizes)
    return [shard(data, end - size, end, batch_axis, device) for device, size, end in zip(devices, sizes, ends)]


def refuse_word(devices: object) -> None:
    """DeviceUnavailable: `devices` is a word such as ``"cpu:2"`` in the place of a list."""
    if isinstance(devices, str):
        raise DeviceUnavailable(f"devices is the word {devices!r}; expected a list: write gp.devices({devices!r})")


def shard(data: Nested, begin: int, end: int, axis: int, device: mx.Context) -> Nested:
    """The samples from `begin` to `end` of a batch, nested like it, on a device."""
    return map_arrays(lambda array: _to_device(_slice(array, begin, end, axis), device), data)


def _slice(array: mx.nd.NDArray | np.ndarray, begin: int, end: int, axis: int) -> mx.nd.NDArray | np.ndarray:
    if isinstance(array, mx.nd.NDArray) and axis and not isinstance(array, mx.np.ndarray):
        return array.slice_axis(axis=axis, begin=begin, end=end)
    return array[(slice(None),) * axis + (slice(begin, end),)]
