"""Comparison of the copies of a net's parameters over the devices and processes that train it."""

import zlib
from collections.abc import Sequence
from typing import Optional

import numpy as np

from ..compat import mx
from ..compat.array_types import to_device
from ..engine import make_plain, push, view
from ..errors import ReplicasDiffer
from ..kvstore import as_store, together
from ..kvstore.collective import gather
from ..nn.sync_batch_norm.participants import STATISTICS

DIGEST_BITS = 32
_ADVICE = (
    "Equal weights stay equal if every process starts from the same ones and adds up its gradients with the others: "
    "write gluon.Trainer(..., kvstore=store), load checkpoints on all processes, and give all the same learning rate"
)


def check_replicas(net: mx.gluon.Block, store: Optional[mx.kv.KVStoreBase] = None) -> None:
    """Raise an error unless all devices, and all processes, hold the same parameters.

    Call it in a loop of your own, on every process, after a step or once per epoch. It waits for the parameters and
    reads them once (checksums travel, not weights). Running statistics of batch norm are left out: with plain BatchNorm
    they are those of each device. So are parameters that have no values yet.

    Args:
        net: the block whose parameters are compared.
        store: the KVStore through which the processes meet; None compares the devices of this process alone.

    Raises:
        ReplicasDiffer: on every process, with the first parameter that differs and who holds what.

    Example:
        >>> net = mx.gluon.nn.Dense(1, in_units=1, prefix="dense_")
        >>> net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
        >>> check_replicas(net)
        >>> net.weight.data(mx.cpu(1))[:] = 7
        >>> check_replicas(net)
        Traceback (most recent call last):
        gluon_parallel.errors.ReplicasDiffer: parameter weight differs between cpu(0) and cpu(1)...
    """
    parameters = {
        name: parameter
        for name, parameter in net._collect_params_with_prefix().items()
        if parameter._data is not None and not parameter.name.endswith(STATISTICS)
    }
    copies = {name: [_digest(data.asnumpy()) for data in one.list_data()] for name, one in parameters.items()}
    own = np.array([digests[0] for digests in copies.values()], np.float64)
    rows = own[None]
    if store is not None:
        rows = together(store, lambda: gather(as_store(store, "check_replicas"), "gp.check_replicas()", own))
    if (rows != rows[0]).any():
        number = int(np.argmax((rows != rows[0]).any(axis=0)))
        raise ReplicasDiffer(
            f"parameter {list(copies)[number]} differs between the processes {_groups(rows[:, number])}"
            f"{_more((rows != rows[0]).any(axis=0).sum())}. {_ADVICE}"
        )
    apart = [name for name, digests in copies.items() if len(set(digests)) > 1]
    if apart:
        first = copies[apart[0]]
        other = next(index for index, digest in enumerate(first) if digest != first[0])
        devices = parameters[apart[0]].list_ctx()
        raise ReplicasDiffer(
            f"parameter {apart[0]} differs between {devices[0]} and {devices[other]}{_more(len(apart))}. Set weights "
            "with parameter.set_data(array), which sets all devices, and sum the gradients of all devices in every step"
        )


def start_digest(arrays: Sequence[mx.nd.NDArray]) -> mx.nd.NDArray:
    """Queue a checksum of dense arrays, in this order; does not wait for them.

    Returns:
        An array that becomes the checksum's bits, (DIGEST_BITS,) of float64 zeros and ones on the CPU.
    """
    on_host = [to_device(array, mx.cpu(0)) if array.ctx.device_type == "gpu" else array for array in arrays]
    make_plain(*on_host)
    bits = mx.nd.zeros(DIGEST_BITS, ctx=mx.cpu(), dtype="float64")

    def compute() -> None:
        digest = 0
        for array in on_host:
            digest = _digest(view(array), digest)
        view(bits)[:] = [digest >> position & 1 for position in range(DIGEST_BITS)]

    push(compute, read=on_host, write=[bits], name="digest")
    return bits


def _digest(array: np.ndarray, before: int = 0) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, before)


def _groups(digests: np.ndarray) -> str:
    """Which ranks hold the same.

    Example:
        >>> _groups(np.array([5.0, 7.0, 5.0]))
        '0, 2 | 1'
    """
    ranks: dict[float, list[int]] = {}
    for rank, digest in enumerate(digests.tolist()):
        ranks.setdefault(digest, []).append(rank)
    return " | ".join(", ".join(map(str, group)) for group in ranks.values())


def _more(count: int) -> str:
    return f", and {count - 1} more do" if count > 1 else ""
