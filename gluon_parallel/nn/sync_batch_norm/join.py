"""Join for uneven inputs: a process without samples takes part in the others' exchanges with zeros."""

from __future__ import annotations

from typing import Callable

from ...compat import mx
from ...device_threads.thread import thread_of
from ...errors import BarrierBroken
from ..blocks import blocks_of
from .layer import SyncBatchNorm
from .participants import waiting_groups


def join(net: mx.gluon.Block, launch: Callable[[], object] | None = None) -> None:
    """Have the layers of `net` take part in one training step of the other processes with zero samples.

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
