"""Time that SyncBatchNorm layers spend, by what they spend it on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ...native import locked
from ...native.records import C, address_of
from .rendezvous import named
from .sync_group import SyncGroup


@contextlib.contextmanager
def measured(groups: Sequence[SyncGroup]) -> Iterator[dict[str, float]]:
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


def _spent(groups: Sequence[SyncGroup]) -> dict[str, float]:
    """What has been spent since the layers were made."""
    fields = {"waiting": "waited", "exchange": "exchanged", "callbacks": "in_callbacks", "processor": "processor"}
    records = [group.rendezvous.record for group in groups]
    spent = {name: sum(getattr(record, field) for record in records) / 1e9 for name, field in fields.items()}
    return spent | {"arithmetic": spent["callbacks"] - spent["waiting"] - spent["exchange"]}


class Pass(NamedTuple):
    """A pass of a layer on one device; times are nanoseconds of the monotonic clock."""

    layer: str
    device: str
    direction: str  # "forward" or "backward"
    call: int  # alike for all devices and processes that exchange
    began: int
    arrived: int  # at the exchange of statistics
    complete: int  # all devices of this process had arrived
    reduced: int  # so had the other processes
    ended: int


@contextlib.contextmanager
def recorded(groups: Sequence[SyncGroup]) -> Iterator[list[Pass]]:
    """While this block runs, record the passes of the layers of these sync groups, at most the last 4096 of each.

    It yields a list that is filled with :class:`Pass` at the end of the block; those that exchanged nothing have
    `arrived`, `complete` and `reduced` where they ended.
    """
    passes: list[Pass] = []
    try:
        for group in groups:
            rendezvous = group.rendezvous
            with locked(rendezvous.mutex):
                rendezvous.ring = (C.PassTimes * C.NUM_PASSES)()
                rendezvous.record.num_passes, rendezvous.record.passes = 0, address_of(rendezvous.ring)
        yield passes
    finally:
        for group in groups:
            rendezvous = group.rendezvous
            with locked(rendezvous.mutex):
                rendezvous.record.passes = 0
            passes += [_pass(group, one) for one in rendezvous.ring[: rendezvous.record.num_passes]]


def _pass(group: SyncGroup, one: Any) -> Pass:
    direction, call = named(one.key)
    call += group.rendezvous.record.earlier_calls
    names = group.rendezvous.names
    device = names[one.device] if 0 <= one.device < len(names) else "?"
    return Pass(group.name, device, direction, call, one.began, one.arrived, one.complete, one.reduced, one.ended)
