"""Allreduce by MXNet's operators, for GPUs: no device carries more traffic than another.

Arrays are put together in buckets, for most are copied faster than an operator is launched. A bucket is cut into one
part per device. Each device gets its part from all others, adds it up, and sends the sum to all (reduce-scatter and
all-gather). A bucket that is too small for this is added up by one device; the devices take turns.
In both ways, each of D devices receives and sends 2 (D - 1) / D of the data, the least that is possible.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from ..compat import mx
from ..compat.array_types import BFLOAT16, as_legacy, to_device

HALVES = (np.float16, BFLOAT16)
BUCKET = 25 << 20  # bytes; of several buckets, the first are summed while the backward pass goes on
IN_PARTS_FROM = 1 << 20  # bytes
_CAN_BE_PUT_TOGETHER = (np.float16, np.float32, np.float64)  # by MXNet's `concat`

# By devices, how many bytes each of them has added up alone.
_loads: dict[tuple[mx.Context, ...], collections.Counter[int]] = collections.defaultdict(collections.Counter)


def sum_arrays(arrays: Sequence[mx.nd.NDArray], scale: float = 1, device: mx.Context | None = None) -> mx.nd.NDArray:
    """`scale` times the sum of ``mx.nd`` arrays in their order, on a device, by default the first's; does not wait.

    They are alike in shape, dtype and storage type. Dense halves are added in float32 and rounded once. The sum of one
    array alone, without a scale, is that array itself.
    """
    first = arrays[0]
    device = first.ctx if device is None else device
    half = first.dtype in HALVES and first.stype == "default"
    with mx.autograd.pause():
        terms = [to_device(array, device) for array in arrays]
        if len(arrays) == 1 and scale == 1:
            return terms[0]
        if half:
            terms = [term.astype(np.float32) for term in terms]
        total = terms[0]
        # `elemwise_add` would hold a temporary buffer until its arrays are there, and other keys would wait for it.
        add = mx.nd.broadcast_add if first.stype == "default" else mx.nd.elemwise_add
        for term in terms[1:]:
            total = add(total, term)
        if scale != 1:
            total = total * scale
        return total.astype(first.dtype) if half else total


def sum_each(lists: Iterable[list[mx.nd.NDArray]], scale: float = 1) -> None:
    """In each list, every array becomes `scale` times the sum of all; the arrays of a list are known to be alike."""
    lists = [list(map(as_legacy, arrays)) for arrays in lists if 0 not in arrays[0].shape]
    enable_peer_access(frozenset(array.ctx for array in itertools.chain(*lists) if array.ctx.device_type == "gpu"))
    together = []
    with mx.autograd.pause():
        for bucket in reversed(_buckets(lists)):  # a backward pass begins with the last gradients
            arrays = bucket[0]
            if len(bucket) > 1:
                parts = [[array.reshape((-1,)) for array in of_device] for of_device in zip(*bucket)]
                arrays = [mx.nd.concat(*of_device, dim=0) for of_device in parts]
                ends = list(itertools.accumulate(part.size for part in parts[0]))
                together += [(array, [0, *ends[:-1]], of_device) for array, of_device in zip(arrays, parts)]
            _sum(arrays, scale)
        # After all sums: it takes the same temporary buffer as `concat`, which would wait for the sum before it.
        for array, begins, parts in together:
            mx.nd._internal._split_v2(array, begins, 0, False, out=parts)


def _buckets(lists: Iterable[list[mx.nd.NDArray]]) -> list[list[list[mx.nd.NDArray]]]:
    """Lists of those that are summed as one: of the same devices and dtype, and of at most ``BUCKET`` bytes."""
    found: list[list[list[mx.nd.NDArray]]] = []
    # (devices, dtype) -> the bucket that is being filled, its bytes
    latest: dict[tuple, tuple[list[list[mx.nd.NDArray]], int]] = {}
    for arrays in lists:
        devices, size = tuple(array.ctx for array in arrays), _num_bytes(arrays[0])
        key = devices, arrays[0].dtype
        bucket, filled = latest.get(key, ([], BUCKET))
        if not _are_apart(arrays, devices) or arrays[0].dtype not in _CAN_BE_PUT_TOGETHER:
            found.append([arrays])
        elif filled + size <= BUCKET:
            bucket.append(arrays)
            latest[key] = bucket, filled + size
        else:
            found.append([arrays])
            latest[key] = found[-1], size
    return found


def _are_apart(arrays: Sequence[mx.nd.NDArray], devices: Sequence[mx.Context]) -> bool:
    return arrays[0].stype == "default" and len(set(devices)) == len(arrays)


def _num_bytes(array: mx.nd.NDArray) -> int:
    return math.prod(array.shape) * np.dtype(array.dtype).itemsize


def _sum(arrays: list[mx.nd.NDArray], scale: float) -> None:
    """Every array becomes `scale` times the sum of all."""
    devices, size = tuple(array.ctx for array in arrays), _num_bytes(arrays[0])
    if _are_apart(arrays, devices) and size >= max(IN_PARTS_FROM, len(arrays) * np.dtype(arrays[0].dtype).itemsize):
        _sum_in_parts([array.reshape((-1,)) for array in arrays], scale)
        return
    load = _loads[devices]
    adding = min(range(len(arrays)), key=load.__getitem__)
    load[adding] += size
    total = sum_arrays(arrays, scale, devices[adding])
    for array in arrays[adding:] + arrays[:adding]:
        total.copyto(array)


def _sum_in_parts(arrays: Sequence[mx.nd.NDArray], scale: float) -> None:
    """The same for vectors on different devices, of which each adds up one part."""
    num, size = len(arrays), arrays[0].size
    parts = [slice(size * part // num, size * (part + 1) // num) for part in range(num)]
    # In each turn every device sends one part and receives one; its own comes first.
    turns = [(source, (source + shift) % num) for shift in range(num) for source in range(num)]
    terms = {(source, target): to_device(arrays[source][parts[target]], arrays[target].ctx) for source, target in turns}
    totals = [sum_arrays([terms[source, target] for source in range(num)], scale) for target in range(num)]
    # From arrays of their own: copies out of one that others write to would wait for each other.
    for source, target in turns:
        totals[source].copyto(arrays[target][parts[source]])


@functools.cache
def enable_peer_access(gpus: frozenset[mx.Context]) -> None:
    """Have these GPUs copy to each other directly where they can, as MXNet's store ``device`` does at its first sum."""
    if len(gpus) > 1:
        store = mx.kv.create("device")
        arrays = [mx.nd.zeros(1, ctx=gpu) for gpu in gpus]
        store.init(0, arrays[0])
        store.pushpull(0, arrays)
