"""Participants of a step: the named devices alone, and `join`, by which a process without samples takes part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Callable

from ...compat import mx
from ...device_threads.thread import thread_of
from ...errors import BarrierBroken
from ..blocks import blocks_of
from .layer import SyncBatchNorm
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
def participants(net: mx.gluon.Block, devices: Sequence[mx.Context]) -> Iterator[None]:
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
    groups = groups_of(net)
    names = frozenset(map(str, devices))
    fewer = any(group.devices() != names for group in groups)
    if fewer:
        mx.nd.waitall()
        for group in groups:
            group.limit_to(names)
    try:
        yield
        if fewer:
            mx.nd.waitall()
            _follow(net, devices)
    except BaseException as error:
        for group in groups:
            group.abandon(error)
        raise
    finally:
        if fewer:
            for group in groups:
                group.limit_to(None)


def join(net: mx.gluon.Block, launch: Callable[[], object] | None = None) -> None:
    """Join for uneven inputs: the layers of `net` take part in a training step of the other processes with no samples.

    For a process that has run out of batches while others have not. It waits for what the others send, and its running
    statistics follow theirs. Each layer must be used once in a step. A net whose layers exchange with no process is
    left alone. If its first layers are frozen, its parameters must be made in the order of its forward pass.

    Args:
        net: the block that the other processes run.
        launch: function that queues whatever else the step exchanges. It is called when no earlier step is in flight
            any more, and before the layers exchange: the others' backward passes may wait for it.

    Raises:
        BarrierBroken: the net is a graph without its layers, whose momentum is not known here.
        WorkerLost: the other processes did not come.
    """
    layers = {block.sync_group.token: block for block in blocks_of(net) if isinstance(block, SyncBatchNorm)}
    groups = [group for group in waiting_groups(net) if group.spans_processes]
    backward = _tokens_with_gradients(net)
    for group in groups:
        if group.token not in layers:
            raise BarrierBroken(f"{group.name}: a graph without its Gluon layers cannot leave out a step; split evenly")
    waiting = [layers[group.token] for group in groups]
    records = [layer.sync_group.rendezvous.record for layer in waiting]
    if waiting:
        mx.nd.waitall()  # so that no call of this process is in flight
    if launch is not None:
        launch()
    try:
        for layer, record in zip(waiting, records):
            layer.sync_group.prepare()
            record.without_samples = 1
        if waiting:
            # They wait side by side: in which order the others come to them is known to them alone. So none may wait
            # for another one's temporary buffer either.
            thread_of("without samples")(lambda: _run(waiting, backward))
            mx.nd.waitall()
    finally:
        for record in records:
            record.without_samples = 0


def _tokens_with_gradients(net: mx.gluon.Block) -> set[str]:
    """The tokens of the sync groups that the others' backward passes come to.

    They end at the first parameter that has a gradient; a net makes its parameters in the order of its forward pass.
    """
    tokens: set[str] = set()
    found = False
    for parameter in net.collect_params().values():
        found = found or parameter.grad_req != "null"
        if found and hasattr(parameter, "sync_group"):  # behind the layer's gamma and beta
            tokens.add(parameter.sync_group.token)
    return tokens


def _run(layers: list[SyncBatchNorm], with_backward: set[str]) -> None:
    """Queue a pass of each layer on all its devices, also backward if its token is in the set; values do not matter."""
    for layer in layers:
        axis, parameters = layer._kwargs["axis"], (layer.gamma, layer.beta, layer.running_mean, layer.running_var)
        shape = [1] * max(2, axis + 1, -axis)
        shape[axis] = layer.gamma.shape[0]
        xs = [mx.nd.zeros(shape, ctx=device, dtype=layer.gamma.dtype) for device in layer.gamma.list_ctx()]
        for x in xs:
            x.attach_grad()
        with mx.autograd.record():  # detached, so that the gradients of gamma and beta stay what they are
            ys = [layer.hybrid_forward(mx.nd, x, *(one.data(x.ctx).detach() for one in parameters)) for x in xs]
        if layer.sync_group.token in with_backward:
            mx.autograd.backward(ys, [mx.nd.zeros_like(y) for y in ys])
