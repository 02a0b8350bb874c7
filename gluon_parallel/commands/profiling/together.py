"""Recordings of all processes in one, on the clock of process 0."""

import time
from pathlib import Path

import numpy as np

from ...kvstore.contract import is_distributed
from ...kvstore.exchange import gather
from ...kvstore.objects import gather_objects

_ROUNDS = 20


def host():
    """What tells apart the hosts, and so the monotonic clocks, of the processes."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def gathered(store, recording):
    """The recordings of all processes by rank, on the clock of process 0; all processes call it.

    Args:
        store: through which they meet; None, or one with a single timeline, for this process alone.
    """
    if not is_distributed(store):
        return [recording]
    times = np.zeros((_ROUNDS, 2))
    start = time.monotonic_ns()
    for number in range(_ROUNDS):
        times[number, 0] = time.monotonic_ns() - start
        gather(store, "gp.profile()", np.zeros(1))
        times[number, 1] = time.monotonic_ns() - start
    all_times = gather(store, "gp.profile()", times.reshape(-1)).reshape(store.num_workers, _ROUNDS, 2)
    starts, found = zip(*gather_objects((start, recording), store, "gp.profile()"))
    return [
        one
        if one.host == found[0].host
        else one.moved(starts[0] - starts[rank] + offset(all_times[0], all_times[rank]))
        for rank, one in enumerate(found)
    ]


def offset(reference, times):
    """How far the clock of `reference` is ahead of that of `times`, in whole units of theirs.

    No exchange ends before all processes have begun it. So each one gives a lower and an upper bound, and the
    estimate is the middle of the tightest bounds.

    Args:
        reference, times: (rounds, 2); when a process began each exchange, and when it ended there.

    Example:
        >>> offset(np.array([[100.0, 103.0]]), np.array([[0.0, 3.0]]))
        100
    """
    lower = (reference[:, 0] - times[:, 1]).max()
    upper = (reference[:, 1] - times[:, 0]).min()
    return round((lower + upper) / 2)
