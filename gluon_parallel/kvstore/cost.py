"""Latency-bandwidth cost model of allreduce by MPI, a ring and parameter servers."""

import math
from collections.abc import Sequence

from .mpi.operations import TWO_OR_THREE
from .mpi.plan import plan_buckets

# Processor time, measured over tcp between processes of one machine.
PER_MESSAGE = 1.7e-6  # seconds for each round of an operation
PER_BYTE = 0.42e-9  # seconds for each byte that a process sends: to copy it, and to add one that it receives
PER_SUM = 63e-6  # seconds in which the store starts and ends an operation, of which MPI takes 3e-6
PER_ARRAY = 2e-6  # seconds for each array of a bucket
PER_STATISTICS = 50e-6  # seconds in which the store starts and ends an exchange of SyncBatchNorm's statistics


def exchange_seconds(num_workers: int, size: float, latency: float, bandwidth: float, kind: str = "mpi") -> float:
    """Seconds that one sum of `size` bytes over `num_workers` processes takes, each on a host of its own.

    mpi: recursive halving reduce-scatter and recursive doubling allgather (Rabenseifner), 2 log2(num_workers) rounds,
    as many bytes as a ring; two or three processes send each other the whole array. ring (Horovod): 2 (num_workers - 1)
    rounds. ps: each process sends all to the servers, one per process, and gets it back. Processes are equal, nothing
    is congested, and for each byte the slower one of link and processor counts. The processes of a host sum in shared
    memory first: count hosts.

    Args:
        latency: seconds.
        bandwidth: bytes per second of each process.
        kind: ``mpi``, ``ring`` or ``ps``.

    Example:
        >>> round(exchange_seconds(4, 100e6, latency=25e-6, bandwidth=1.25e9), 4)
        0.1202
    """
    return _work_seconds(num_workers, size, bandwidth, kind) + _rounds(num_workers, kind) * latency


def step_seconds(
    num_workers: int, sizes: Sequence[float], latency: float, bandwidth: float, kind: str = "mpi", backward: float = 0.0
) -> float:
    """Seconds that the sums of a step still take when the backward pass has ended.

    The arrays are in the order in which they become ready, evenly over the pass; over mpi small ones share buckets.
    Rounds of several sums overlap, so the latency counts once.

    Args:
        sizes: bytes of each array.
        num_workers, latency, bandwidth, kind: as of :func:`exchange_seconds`.
        backward: seconds of the backward pass; 0 if the sums start after it.

    Example:
        >>> sizes, link = [2e6] * 50, {"latency": 25e-6, "bandwidth": 1.25e9}
        >>> round(step_seconds(4, sizes, **link), 3), round(step_seconds(4, sizes, **link, backward=0.1), 3)
        (0.124, 0.026)
    """
    num, end = len(sizes), 0.0
    buckets = plan_buckets(sizes, ["array"] * num, range(num)) if kind == "mpi" else [[number] for number in range(num)]
    for bucket in sorted(buckets, key=max):
        size, ready = sum(sizes[number] for number in bucket), (max(bucket) + 1) / num
        work = len(bucket) * PER_ARRAY + _work_seconds(num_workers, size, bandwidth, kind)
        end = max(end, ready * backward) + work
    return max(0.0, end - backward) + _rounds(num_workers, kind) * latency


def _work_seconds(num_workers: int, size: float, bandwidth: float, kind: str) -> float:
    """Seconds of :func:`exchange_seconds` in which no other sum can go on: all but the latency."""
    messages = 2 * num_workers if kind == "ps" else _rounds(num_workers, kind)
    return PER_SUM + messages * PER_MESSAGE + times_sent(num_workers, kind) * size * max(1 / bandwidth, PER_BYTE)


def times_sent(num_workers: int, kind: str) -> float:
    """How many times its size a process sends of an array in a sum, as a mean."""
    is_sent_whole = kind == "mpi" and num_workers <= TWO_OR_THREE
    return num_workers - 1 if is_sent_whole else 2 * (num_workers - 1) / num_workers


def statistics_seconds(num_workers: int, size: float, latency: float, bandwidth: float) -> float:
    """Seconds in which the store ``mpi`` gives each process the vectors of all, of `size` bytes; each on its own host.

    Example:
        >>> [round(1e3 * statistics_seconds(num, 1000, latency=25e-6, bandwidth=1.25e9), 2) for num in (2, 8, 256)]
        [0.08, 0.09, 0.71]
    """
    return PER_STATISTICS + latency + (num_workers - 1) * (PER_MESSAGE + size * max(1 / bandwidth, PER_BYTE))


def _rounds(num_workers: int, kind: str) -> int:
    """How many communication rounds follow each other."""
    return {"mpi": 2 * math.ceil(math.log2(num_workers)), "ring": 2 * (num_workers - 1), "ps": 2}[kind]
