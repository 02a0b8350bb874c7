"""Where the time of SyncBatchNorm layers goes, for whoever wants to make them faster."""

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
        for name, seconds in group.rendezvous.spent().items():
            spent[name] += seconds
        spent["waiting"] += group.barrier.waited
        spent["exchange"] += group.barrier.exchanged
    return {"arithmetic": spent["callbacks"] - spent["waiting"] - spent["exchange"], **spent}
