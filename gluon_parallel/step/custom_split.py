"""Check of the shards that a user's ``split`` function made: all samples of the batch once, one shard per device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import BatchMismatch
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import Nested
from ..mxnet.device_threads.thread import device_of
from ..split import num_samples

_WANTED = "split(data, devices) returns a list of at most one shard per device, each nested like data"


def check_shards(
    shards: Any, num: int, devices: Sequence[mx.Context], axis: int, names: Sequence[str]
) -> tuple[list[Nested], list[int], list[mx.Context]]:
    """The shards of a batch of `num` samples, how many samples each has, and its device.

    Raises:
        BatchMismatch: there is no shard, or one that is nested otherwise; two are on one device, or one on a device
            that does not train; the shards have another number of samples than the batch.
    """
    if not isinstance(shards, (list, tuple)) or not 1 <= len(shards) <= len(devices):
        many = f"{len(shards)} shards" if isinstance(shards, (list, tuple)) else f"a {type(shards).__name__}"
        raise BatchMismatch(f"split: got {many} for the {num} samples of a batch on {len(devices)} devices; {_WANTED}")
    for number, one in enumerate(shards):
        kinds = [type(part).__name__ for part in one] if isinstance(one, (list, tuple)) else f"a {type(one).__name__}"
        if not set(kinds) <= {"list", "tuple"} or len(kinds) != 2:
            raise BatchMismatch(f"split: shard {number} is {kinds}; expected a pair of tuples, (inputs, labels)")
    sizes = [num_samples(one, axis, names=names) for one in shards]
    found_on = [device_of(one, number) for number, one in enumerate(shards)]
    if sum(sizes) != num:
        raise BatchMismatch(
            f"split: {num} sample{'s' * (num > 1)} came in and {sum(sizes)} came out, in shards of "
            f"{', '.join(map(str, sizes))}. Each sample of the batch goes to one device. In arrays, axis {axis} counts "
            "the samples: a list of arrays of one sample each is one sample; stack them"
        )
    if len(set(found_on)) < len(found_on) or not set(found_on) <= set(devices):
        raise BatchMismatch(f"split: the shards are on {found_on}, and the devices are {[*devices]}; {_WANTED}")
    return list(shards), sizes, found_on
