"""Sum of the gradients that a hook does not compress, in one message."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..compat import mx
from ..engine import push, view
from .bucket import BucketStore


def sum_together(arrays: Sequence[mx.nd.NDArray], store: BucketStore) -> None:
    """Arrays of one dtype, which travel as one, become their sums over the processes; returns at once."""
    arrays = [array for array in arrays if array.size]
    if not arrays:
        return
    ends = np.cumsum([array.size for array in arrays]).tolist()
    parts = [slice(end - array.size, end) for array, end in zip(arrays, ends)]
    packed = mx.nd.empty((ends[-1],), dtype=arrays[0].dtype)

    def pack() -> None:
        for array, part in zip(arrays, parts):
            view(packed)[part] = view(array).reshape(-1)

    def unpack() -> None:
        for array, part in zip(arrays, parts):
            view(array).reshape(-1)[:] = view(total)[part]

    push(pack, read=arrays, write=[packed], name="gluon_parallel.sum_together")
    total = store.allreduce(packed)
    push(unpack, read=[total], write=arrays, name="gluon_parallel.sum_together")
