"""Split of a batch into one shard per device, and of items over processes."""

from __future__ import annotations

import copy
import itertools
import numbers
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Callable

import numpy as np

from .errors import BatchMismatch, DeviceUnavailable
from .mxnet.compat import mx
from .mxnet.compat.array_types import Nested, as_current, leaves, to_device

_NUMPY_DTYPES = {np.float16, np.float32, np.float64, np.uint8, np.int8, np.int32, np.int64, np.bool_}


def map_arrays(function: Callable[[Any], Any], data: Nested) -> Nested:
    """The same nesting of tuples, lists and dicts with `function` applied to every array; what else it has stays."""
    if isinstance(data, (mx.nd.NDArray, np.ndarray)):
        return function(data)
    if type(data) in (tuple, list):
        return type(data)([map_arrays(function, part) for part in data])
    return map_items(lambda part: map_arrays(function, part), data)


def _is_array(data: Nested) -> bool:
    return isinstance(data, (mx.nd.NDArray, np.ndarray))


def map_items(function: Callable[[Nested], Nested], data: Nested) -> Nested:
    """The same tuple, list or dict with `function` applied to what stands in it; anything else as it is."""
    if isinstance(data, dict):
        mapped = copy.copy(data)  # also a defaultdict, whose constructor takes other arguments
        mapped.update((key, function(value)) for key, value in data.items())
        return mapped
    if not isinstance(data, (tuple, list)):
        return data
    parts = [function(value) for value in data]
    return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)


def map_aligned(function: Callable[[list], Any], parts: Sequence[Nested]) -> Nested:
    """`function` of the list of what stands at each place of equally nested parts, nested like them."""
    first = parts[0]
    if isinstance(first, dict):
        return {key: map_aligned(function, [part[key] for part in parts]) for key in first}
    if not isinstance(first, (tuple, list)):
        return function(list(parts))
    found = [map_aligned(function, each) for each in zip(*parts)]
    return type(first)(*found) if hasattr(first, "_fields") else type(first)(found)


def with_arrays(data: Nested) -> Nested:
    """The batch with arrays in the place of what ``gluon.utils.split_and_load`` makes one of: lists of numbers, CSR."""
    if _is_array(data):
        return data
    if type(data).__module__.startswith("scipy.sparse") and getattr(data, "format", None) == "csr" and data.ndim == 2:
        return mx.nd.array(sys.modules["scipy.sparse"].csr_matrix(data), ctx=mx.cpu())  # MXNet knows no csr_array
    is_nested = isinstance(data, (tuple, list, dict))
    if is_nested:
        parts = [leaf for _, leaf in leaves(data)]
        if isinstance(data, dict) or not parts or not all(isinstance(leaf, (numbers.Real, np.bool_)) for leaf in parts):
            return map_items(with_arrays, data)
    try:
        array = np.asarray(data, np.float32)  # as mx.nd.array makes of everything that is no array
    except (TypeError, ValueError) as error:
        if is_nested:
            raise BatchMismatch(f"a {type(data).__name__} of the batch makes no array of numbers: {error}") from None
        return data
    return array if array.ndim else data


def num_samples(
    data: Nested, batch_axis: int = 0, allow_empty: bool = False, names: Sequence[str] | None = None
) -> int:
    """How many samples a (nested) batch holds.

    Args:
        data, batch_axis: as of :func:`split_and_load`.
        allow_empty: return 0 for a batch without samples: the share of some processes of a very small batch, whose
            lists of samples have none.
        names: of the members of a tuple `data`, for errors.

    Raises:
        BatchMismatch: its arrays disagree, one has no such axis, or there is no array or no sample at all.

    Example:
        >>> num_samples((np.zeros((6, 3)), np.zeros(6)))
        6
    """
    if not isinstance(batch_axis, (int, np.integer)) or batch_axis < 0:
        raise BatchMismatch(f"batch_axis is {batch_axis!r}; expected a whole number, counted from the front")
    lengths: dict[str, int] = {}
    for where, array in leaves(data if names is None else dict(zip(names, data))):
        if not isinstance(array, (mx.nd.NDArray, np.ndarray)):
            raise BatchMismatch(
                f"{where} is a {type(array).__name__}; a batch is an NDArray, a NumPy array, or a tuple, list or dict "
                "of those: write numpy.asarray(...) around numbers"
            )
        shape = array.shape
        if len(shape) <= batch_axis:
            raise BatchMismatch(f"{where} has shape {shape}, so there is no axis {batch_axis} to split along")
        lengths[where] = shape[batch_axis]
    if not lengths:
        if allow_empty:
            return 0
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


def _from_numpy(array: np.ndarray, device: mx.Context) -> mx.nd.NDArray:
    """A piece of a NumPy array on `device`."""
    # float64 is what NumPy makes by default and float32 what Gluon nets are made of; mx.nd.array converts likewise
    dtype = array.dtype if array.dtype.type in _NUMPY_DTYPES - {np.float64} else np.dtype(np.float32)
    try:
        if array.dtype.kind in "cmMV":
            raise TypeError("its values are no real numbers")
        array = array.astype(dtype, copy=False)
    except (TypeError, ValueError) as error:
        raise BatchMismatch(
            f"MXNet makes no array of the batch's array of dtype {array.dtype}: {error}; write array.astype('float32')"
        ) from None
    via = mx.cpu() if _is_gpu(device) else device  # MXNet waits for a GPU where it gets an array of NumPy
    with mx.autograd.pause():  # a recorded copy would connect two devices, see `hand_written_loops`
        return as_current(mx.nd.array(array, ctx=via, dtype=dtype).as_in_context(device))


def _is_gpu(device: mx.Context) -> bool:
    return device.device_type == "gpu"


def split_and_load(
    data: Nested,
    devices: Iterable[mx.Context] | mx.Context | None = None,
    batch_axis: int = 0,
    even_split: bool = False,
    ctx_list: Iterable[mx.Context] | None = None,
) -> list[Nested]:
    """Cut a batch along `batch_axis` and put one shard on each device.

    Takes what ``gluon.utils.split_and_load`` takes, in the same positions, and more: nested batches, fewer samples
    than devices, and uneven sizes by default. A shard that already is where it belongs is a view, not a copy.

    Args:
        data: an NDArray (dense or CSR), a NumPy array, a CSR matrix of SciPy, or a list or other sequence of numbers;
            or a (nested) tuple, list or dict of arrays, with the same number of samples. (Gluon's function makes one
            array of a list of arrays.) NumPy's dtypes that MXNet has stay, but for float64; it and all others, and
            sequences of numbers, become float32 as in ``mx.nd.array``.
        devices: list of ``mx.Context``, see :func:`gluon_parallel.devices`.
        batch_axis: the axis that counts samples.
        even_split: refuse a batch that does not divide evenly.
        ctx_list: the name of `devices` in Gluon's function.

    Returns:
        A list of shards, each nested like `data`; their sizes differ by at most one and add up to the batch. With
        fewer samples than devices there are only as many shards as samples.

    Raises:
        BatchMismatch: the batch is empty or holds something else, its parts differ in length, or `even_split` cannot be
            had.
        DeviceUnavailable: `devices` are words such as ``"cpu:2"``, which :func:`gluon_parallel.devices` reads, or None.

    Example:
        >>> shards = split_and_load(np.arange(5), [mx.cpu(0), mx.cpu(1)])
        >>> [shard.asnumpy().tolist() for shard in shards]
        [[0, 1, 2], [3, 4]]
    """
    devices = as_devices(ctx_list if devices is None else devices)
    data = with_arrays(data)
    num = num_samples(data, batch_axis)
    if even_split and num % len(devices):
        raise BatchMismatch(
            f"{num} samples do not divide evenly over {len(devices)} devices; use even_split=False, or a batch "
            f"size that is a multiple of {len(devices)}"
        )
    return cut(data, shard_sizes(num, len(devices)), devices, batch_axis)


def cut(data: Nested, sizes: Sequence[int], devices: Sequence[mx.Context], batch_axis: int) -> list[Nested]:
    """Shards of these sizes, which are known to add up to the batch, on devices."""
    if len(sizes) == 1:  # whole arrays need no slice, which under autograd.record() would be an operator

        def convert(array: mx.nd.NDArray | np.ndarray) -> mx.nd.NDArray:
            return (to_device if isinstance(array, mx.nd.NDArray) else _from_numpy)(array, devices[0])

        return [map_arrays(convert, data)]
    ends = itertools.accumulate(sizes)
    return [shard(data, end - size, end, batch_axis, device) for device, size, end in zip(devices, sizes, ends)]


def listed(devices: Any) -> Any:
    """A list of what any iterable but words and dicts yields, for it may yield it once only; anything else as it is."""
    return list(devices) if isinstance(devices, Iterable) and not isinstance(devices, (str, dict)) else devices


def as_devices(devices: Any) -> list[mx.Context]:
    """The list of devices, or of the one that stands in its place; DeviceUnavailable says what to write instead."""
    if isinstance(devices, mx.Context):
        return [devices]
    devices = listed(devices)
    found = devices if isinstance(devices, list) else [devices]
    if found is devices and found and all(isinstance(one, mx.Context) for one in found):
        return found
    given = repr(devices)
    spec = given if found and all(isinstance(one, str) for one in found) else '"auto"), or gp.devices("cpu:2"'
    raise DeviceUnavailable(f"devices is {given}; expected a list of mx.Context: write gp.devices({spec})")


def shard(data: Nested, begin: int, end: int, axis: int, device: mx.Context) -> Nested:
    """The samples from `begin` to `end` of a batch, nested like it, on a device."""

    def cut_out(array: mx.nd.NDArray | np.ndarray) -> mx.nd.NDArray:
        convert = to_device if isinstance(array, mx.nd.NDArray) else _from_numpy
        return convert(_slice(array, begin, end, axis), device)

    return map_arrays(cut_out, data)


def first_samples(data: Nested, num: int, axis: int) -> Nested:
    """The first `num` samples of a batch, at least one, nested like it and where they are."""
    return map_arrays(lambda array: _slice(array, 0, num, axis), data)


def _slice(array: mx.nd.NDArray | np.ndarray, begin: int, end: int, axis: int) -> mx.nd.NDArray | np.ndarray:
    if not axis:
        if getattr(array, "stype", "default") == "row_sparse":
            raise BatchMismatch("MXNet cannot cut a row_sparse array: write array.tostype('default')")
        return array[begin:end]  # of CSR arrays, too
    if isinstance(array, mx.nd.NDArray) and not isinstance(array, mx.np.ndarray):
        return array.slice_axis(axis=axis, begin=begin, end=end)
    return array[(slice(None),) * axis + (slice(begin, end),)]
