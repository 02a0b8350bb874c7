"""A step in which this process has no samples at all: the other processes are not kept waiting for it."""

from __future__ import annotations

import concurrent.futures

import numpy as np

from ...compat import mx
from ...compat.array_types import as_legacy
from ...errors import BarrierBroken
from .layer import SyncBatchNorm
from .participants import groups_of


def _layers(net):
    found = {}

    def visit(block):
        if isinstance(block, SyncBatchNorm) and not block._kwargs["use_global_stats"]:
            found[block.sync_group.token] = block

    net.apply(visit)
    return found


def absent(net, launch=None):
    """Have the layers of `net` take part in one training step of the other processes with zero samples.

    For a process that has run out of batches while others have not. It waits for what the others send, and its running
    statistics follow theirs. Each layer must be used once in a step. A net whose layers meet no other process is left
    alone.

    Args:
        net: the block that the other processes run.
        launch: function that queues whatever else the step exchanges. It is called when no earlier step is in flight
            any more, and before the layers meet: the others' backward passes may wait for it.

    Raises:
        BarrierBroken: the net is a graph without its layers, whose momentum is not known here.
        WorkerLost: the other processes did not come.
    """
    layers = _layers(net)
    meeting = [group for group in groups_of(net) if group.meets_processes]
    unknown = [group.name for group in meeting if group.token not in layers and not _constant(net, group)]
    if unknown:
        raise BarrierBroken(f"{unknown[0]}: a graph without its Gluon layers cannot leave out a step; split evenly")
    meeting = [layers[group.token] for group in meeting if group.token in layers]
    if meeting:
        mx.nd.waitall()  # so that no call of this process is in flight
    if launch is not None:
        launch()
    if not meeting:
        return
    for layer in meeting:
        layer.sync_group.prepare()
    # All at once: in which order the others come to the layers is known to them alone.
    with concurrent.futures.ThreadPoolExecutor(len(meeting)) as threads:
        results = list(threads.map(lambda layer: layer.sync_group.send_nothing(layer.gamma.shape[0]), meeting))
    for layer, whole in zip(meeting, results):
        momentum = layer._kwargs["momentum"]
        for parameter, value in ((layer.running_mean, whole.mean), (layer.running_var, whole.variance)):
            for array in parameter.list_data():
                kept = momentum * array.asnumpy().astype(np.float64)
                as_legacy(array)[:] = mx.nd.array(kept + (1 - momentum) * value, ctx=array.ctx, dtype=array.dtype)


def _constant(net, group):
    """Whether the group belongs to a layer of `net` whose statistics are constants: it meets nobody."""
    found = []

    def visit(block):
        if isinstance(block, SyncBatchNorm) and block._kwargs["use_global_stats"]:
            found.append(block.sync_group)

    net.apply(visit)
    return group in found
