"""Compression by the store itself, while the backward pass goes on: 16 bits or 2 bits per value."""

from typing import Any, NamedTuple


class StoreCompression(NamedTuple):
    """A communication hook that is no function: the store ``mpi`` compresses, as by ``compression_params``."""

    compression_params: dict[str, Any]


float16 = StoreCompression({"type": "fp16"})
bfloat16 = StoreCompression({"type": "bf16"})


def two_bits(threshold: float = 0.5) -> StoreCompression:
    """MXNet's 2 bits: each process sends -threshold, 0 or threshold, and keeps the rest for later updates.

    Args:
        threshold: of the same size as a process's gradients, which are sums over its samples.

    Example:
        >>> two_bits(0.1).compression_params
        {'type': '2bit', 'threshold': 0.1}
    """
    return StoreCompression({"type": "2bit", "threshold": threshold})
