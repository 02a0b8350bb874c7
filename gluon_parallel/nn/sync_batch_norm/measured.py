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

    def seconds(field):
        return sum((float(group.rendezvous.record[field][0]) / 1e9 for group in groups), 0.0)

    waiting = seconds("waited") + sum(group.barrier.waited for group in groups)
    exchange = seconds("exchanged") + sum(group.barrier.exchanged for group in groups)
    callbacks = seconds("in_callbacks")
    arithmetic = callbacks - waiting - exchange
    return {
        "arithmetic": arithmetic, "waiting": waiting, "exchange": exchange, "callbacks": callbacks,
        "processor": seconds("processor"),
    }  # fmt: skip
