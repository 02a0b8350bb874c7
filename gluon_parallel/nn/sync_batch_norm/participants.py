"""Participants of a step: the named devices alone run a net, and its SyncBatchNorm layers wait for no other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from ...compat import mx
from ...split import as_devices
from ..blocks import blocks_of
from .layer import SyncBatchNorm
from .start import one_step
from .sync_group import SyncGroup, any_group

STATISTICS = ("running_mean", "running_var", "moving_mean", "moving_var")  # ends of their parameters' names


def groups_of(net: mx.gluon.Block) -> list[SyncGroup]:
    """The sync groups of `net`, which its running means have; those that a graph describes once it has run."""
    if not any_group():  # most nets have none; every step asks
        return []
    found = [getattr(parameter, "sync_group", None) for parameter in net.collect_params().values()]
    return list(dict.fromkeys(group for group in found if group is not None))


def waiting_groups(net: mx.gluon.Block) -> list[SyncGroup]:
    """The sync groups of `net` whose devices wait for each other in training: all but those of `use_global_stats`."""
    layers = [block for block in blocks_of(net) if isinstance(block, SyncBatchNorm)]
    waiting = {layer.sync_group for layer in layers if not layer._kwargs["use_global_stats"]}
    constant = {layer.sync_group for layer in layers} - waiting
    return [group for group in groups_of(net) if group not in constant]


def _follow(net: mx.gluon.Block, devices: Sequence[mx.Context]) -> None:
    """Give the devices that were left out the running statistics of those that took part."""
    taking_part = list(devices)
    for parameter in net.collect_params().values():
        if parameter.grad_req == "null" and parameter.name.endswith(STATISTICS):
            source = next((device for device in parameter.list_ctx() if device in taking_part), None)
            for device in parameter.list_ctx():
                if source is not None and device not in taking_part:
                    parameter.data(source).copyto(parameter.data(device))


@contextlib.contextmanager
def participants(net: mx.gluon.Block, devices: Iterable[mx.Context]) -> Iterator[None]:
    """Within this block, `net` is run on `devices` only; its SyncBatchNorm layers wait for no other.

    For the last, small batch of an epoch in a hand-written loop, and for training on one device of several. Put the
    forward *and* the backward pass inside. When devices are left out, the block waits for the operations launched
    before it and, at its end, for its own; then the devices that were left out receive the running statistics. With
    all devices it costs nothing, so a loop may use it for every step.

    If the block raises, the devices that wait in a layer are released at once, rather than after their timeout, and
    the next step starts anew: put a step into it whose data may fail on one device.

    Args:
        net: the block that holds the layers; one without SyncBatchNorm is left alone.
        devices: list of ``mx.Context`` that run the net, each the same number of times.

    Example:
        >>> net = mx.gluon.nn.BatchNorm(in_channels=3)  # or a net with SyncBatchNorm layers
        >>> net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
        >>> shards = [mx.nd.ones((1, 3), mx.cpu(0))]
        >>> with participants(net, [shard.context for shard in shards]):
        ...     with mx.autograd.record():
        ...         outputs = [net(shard) for shard in shards]
    """
    groups, devices, fewer = groups_of(net), as_devices(devices), False
    names = frozenset(map(str, devices))
    try:
        with one_step(groups):
            fewer = any(group.devices() != names for group in groups)
            if fewer:
                mx.nd.waitall()
                for group in groups:
                    group.limit_to(names)
            yield
            if fewer:
                mx.nd.waitall()
                _follow(net, devices)
    finally:
        if fewer:
            for group in groups:
                group.limit_to(None)
