"""Comparison of the processes' weights after a few steps, in the background of the training."""

from __future__ import annotations

import numpy as np

from ..compat import mx
from ..compat.array_types import Nested, as_legacy, leaves
from ..errors import ReplicasDiffer, SeparateTraining, warn
from ..kvstore.background_sum import BackgroundSum
from ..kvstore.contract import is_distributed
from ..kvstore.reserved_keys import WEIGHTS_DIGEST
from .gradients import trainable
from .replicas import DIGEST_BITS, check_replicas, start_digest

nd = mx.nd

_LONGEST = 1024  # updates between two comparisons


class WeightsComparison:
    """Compares checksums of the weights after updates 1, 2, 4, ..., 1024 and every 1024th from then on.

    The engine computes the checksum and the store sums its bits, while the next step runs; the result is read at the
    next update. The first comparison includes the inputs of the first step: they should differ between processes.
    Inputs that hold one value only, as in a test with made-up data, are left out.

    Args:
        net: whose parameters an error names.
        trainer: whose parameters are compared, those that have a gradient, on the first device.
        shard: the first one of the first step, nested; None for a process without samples, or not to compare inputs.
    """

    def __init__(self, net: mx.gluon.Block, trainer: mx.gluon.Trainer, shard: Nested | None) -> None:
        self._net, self._trainer = net, trainer
        self._sum = BackgroundSum(trainer._kvstore, WEIGHTS_DIGEST, 2 * DIGEST_BITS)
        self._num_updates = 0
        self._next = 1
        self._pending: mx.nd.NDArray | None = None  # an array that becomes the sums of the bits
        self._inputs = next((leaf for _, leaf in leaves(shard) if isinstance(leaf, nd.NDArray)), None)

    def update_done(self) -> None:
        """After an update: start a comparison if it is time for one."""
        self._num_updates += 1
        if self._num_updates < self._next or not is_distributed(self._trainer._kvstore):
            return
        self._next = self._num_updates + min(self._num_updates, _LONGEST)
        weights = [parameter.list_data()[0] for parameter in trainable(self._trainer)]
        inputs = nd.zeros(DIGEST_BITS, ctx=mx.cpu(), dtype="float64")
        if self._inputs is not None:
            flat = as_legacy(self._inputs).astype("float32")
            varies = (flat.max() != flat.min()).as_in_context(mx.cpu()).astype("float64")
            inputs = start_digest([self._inputs]) * varies
            self._inputs = None
        self._pending = self._sum.sum(nd.concat(start_digest(weights), inputs, dim=0))

    def check(self) -> None:
        """Before an update: read the comparison that was started after the last one, if any.

        Raises:
            ReplicasDiffer: the weights have come apart; on every process.
        """
        if self._pending is None:
            return
        store, sums, self._pending = self._trainer._kvstore, self._sum.read(self._pending), None
        equal = np.isin(sums, (0, store.num_workers))
        if not equal[:DIGEST_BITS].all():
            check_replicas(self._net, store)
            raise ReplicasDiffer(
                f"the trainer's parameters differ between the {store.num_workers} processes, seen after update "
                f"{self._num_updates}. Every process must update with the same gradients, learning rate and "
                "optimizer, and draw no noise of its own"
            )
        if equal[DIGEST_BITS:].all() and sums[DIGEST_BITS:].any() and store.rank == 0:
            warn(
                f"the first batch was the same on all {store.num_workers} processes: all do the same work. Each must "
                "have its part of the data: hand the loader to gp.prepare, or make gp.sampler.BatchSampler or "
                "gp.datasets.batches with rank=store.rank and num_workers=store.num_workers",
                SeparateTraining,
            )
