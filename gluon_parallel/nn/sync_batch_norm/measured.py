"""Time that SyncBatchNorm layers spend, by what they spend it on."""

from __future__ import annotations

import contextlib


@contextlib.contextmanager
def measured(groups):
    """While this block runs, add up what the passes of the layers of these sync groups spend.

    Args:
        groups: the layers' `sync_group`.

    Yields:
        A dict that is filled at the end of the block: seconds of all devices together spent ``"waiting"`` (for other
        devices), on ``"exchange"`` (with other processes), on ``"arithmetic"`` (all else) and their sum
        ``"callbacks"``; and ``"processor"``, the processor time that the passes' own threads took of it.

    Example:
        >>> with measured([]) as spent:
        ...     pass
        >>> spent["callbacks"]
        0.0
    """
    spent: dict[str, float] = {}
    before = _spent(groups)
    try:
        yield spent
    finally:
        spent.update({name: seconds - before[name] for name, seconds in _spent(groups).items()})


def _spent(groups):
    """What has been spent since the layers were made."""
    spent = {"waiting": 0.0, "exchange": 0.0, "callbacks": 0.0, "processor": 0.0}
    for group in groups:
        record = group.rendezvous.record[0]
        spent["waiting"] += record["waited"] / 1e9 + group.barrier.waited
        spent["exchange"] += record["exchanged"] / 1e9 + group.barrier.exchanged
        spent["callbacks"] += record["in_callbacks"] / 1e9
        spent["processor"] += record["processor"] / 1e9
    return spent | {"arithmetic": spent["callbacks"] - spent["waiting"] - spent["exchange"]}
