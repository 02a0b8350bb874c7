"""Checks of the weights in the background of the training: finite, and equal on all processes."""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Sequence

import numpy as np

from ..allreduce.gradients import trainable
from ..compat import mx
from ..compat.array_types import Nested, as_legacy, leaves
from ..engine import Call, check, make_plain
from ..errors import NotFinite, ReplicasDiffer, SeparateTraining, warn
from ..kvstore.background_sum import BackgroundSum
from ..kvstore.contract import is_distributed
from ..kvstore.reserved_keys import WEIGHTS_DIGEST
from ..native import address
from ..native.records import C, address_of
from .precision import all_finite
from .replicas import DIGEST_BITS, check_replicas, start_digest

nd = mx.nd

_LAG = 10  # updates after which the result of a look is read: losses are read eight steps later, and shall come first


def _after(num_updates: int, longest: int) -> int:
    """The next of the updates 1, 2, 4, ..., and every `longest`-th from then on."""
    return num_updates + min(num_updates, longest)


# Looks that the engine has still to make: their owner cannot keep them, for the garbage collector frees the handles of
# all arrays of a cycle.
_under_way: set[_Look] = set()
_DTYPES = {np.dtype(np.float32): C.FLOAT32, np.dtype(np.float64): C.FLOAT64}


class _Look:
    """A look for NaN and infinity in some arrays, which can be started again when its result has been read."""

    def __init__(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        self._arrays, self._flags = list(arrays), [nd.empty(1, ctx=mx.cpu(), dtype="float64")]
        is_in_c = [array.ctx.device_type != "gpu" and np.dtype(array.dtype) in _DTYPES for array in arrays]
        self._on_host = [array for array, here in zip(arrays, is_in_c) if here and array.size]
        self._others = [array for array, here in zip(arrays, is_in_c) if not here]
        handles = [array.handle.value for array in (*self._on_host, self._flags[0])]
        sizes = [array.size for array in self._on_host]
        dtypes = [_DTYPES[np.dtype(array.dtype)] for array in self._on_host]
        self._memory = [np.array(one, np.int64) for one in (handles, sizes, dtypes)]
        self._record = C.FiniteLook(len(sizes), *map(address_of, self._memory))
        function, record = address("gp_find_finite"), address_of(self._record)
        self._call = Call(function, record, self._on_host, self._flags[:1], "finite weights", at_once=False)

    def is_of(self, arrays: Sequence[mx.nd.NDArray]) -> bool:
        """Whether it looks at these arrays."""
        return len(arrays) == len(self._arrays) and all(map(operator.is_, arrays, self._arrays))

    def start(self) -> None:
        """Look when the arrays are ready; does not wait."""
        _under_way.difference_update([look for look in _under_way if look._record.has_ended])
        make_plain(*self._on_host)
        self._record.has_ended = 0
        _under_way.add(self)
        self._call.push()
        self._flags[1:] = [all_finite(self._others)] if self._others else []

    def result(self) -> bool:
        """Whether no value is NaN or infinite; waits."""
        return all(flag.asnumpy().all() for flag in self._flags)


class FiniteWeights:
    """Looks for NaN and infinity in the weights after updates 1, 2, 4, 8 and every 8th from then on.

    A NaN stays in a weight that it has reached. The engine reads the first device's weights while the next steps run,
    and the result is read before the tenth update that follows, on every process: a NaN is noticed at most 17 updates
    after the one that wrote it. `accumulate` steps make an update, and `updates_before` were made before.

    Attributes:
        looks_at: after how many updates :meth:`look` is due.
        reads_at: before which update :meth:`check` is due.
    """

    def __init__(self, trainer: mx.gluon.Trainer, accumulate: int, updates_before: int = 0) -> None:
        self._trainer, self._accumulate, self._updates_before = trainer, accumulate, updates_before
        self.looks_at, self.reads_at, self._before = 1, math.inf, 0
        self._pending: collections.deque[tuple[int, _Look]] = collections.deque()  # after which update it looked
        self._done: list[_Look] = []  # to be used again

    def look(self, num_updates: int) -> None:
        self.looks_at = _after(num_updates, 8)
        self._start(num_updates)

    def check(self, num_updates: int, last: bool = False) -> None:
        """After that many updates, before the next one: read the result of the look ten updates before it, if any.

        If no update follows (`last`), look at the weights of the last one, and read all results. NotFinite names the
        first parameter and the step; on every process, since their weights are the same.
        """
        if last and num_updates > max([self._before, *(looked for looked, _ in self._pending)]):
            self._start(num_updates)
        while self._pending and (last or self._pending[0][0] + _LAG <= num_updates + 1):
            looked, look = self._pending.popleft()
            is_finite = look.result()
            self._done.append(look)
            self.reads_at = self._pending[0][0] + _LAG if self._pending else math.inf
            if not is_finite:
                check()  # where an exchange failed, the sum is NaN, and its error says why
                self._raise(looked)
            self._before = looked

    def _start(self, num_updates: int) -> None:
        weights = [parameter.list_data()[0] for parameter in trainable(self._trainer)]
        look = self._done.pop() if self._done else _Look(weights)
        if not look.is_of(weights):
            look = _Look(weights)
        look.start()
        self._pending.append((num_updates, look))
        self.reads_at = self._pending[0][0] + _LAG

    def _raise(self, looked: int) -> None:
        bad = [one for one in trainable(self._trainer) if not np.isfinite(one.list_data()[0].asnumpy()).all()]
        if not bad:
            return  # they have been replaced since
        before, last = ((self._updates_before + num) * self._accumulate for num in (self._before, looked))
        first = before + 1
        when = f"step {last}" if first == last else f"one of the steps {first} to {last}"
        more = f", and {len(bad) - 1} more are" if len(bad) > 1 else ""
        raise NotFinite(
            f"parameter {bad[0].name} is NaN or infinite since {when}{more}. The loss need not show it: MXNet's ReLU "
            "makes NaN 0 on CPUs. NaN or infinity among the inputs of such a step is the usual cause (look for it by "
            "np.isfinite(images).all()), a learning rate that is too large the other one. Begin anew, or from an older "
            "checkpoint"
        )


class WeightsComparison:
    """Compares checksums of the weights after updates 1, 2, 4, ..., 1024 and every 1024th from then on.

    The engine computes the checksum and the store sums its bits while the next step runs; the result is read at the
    next update. The first comparison includes the inputs of the first step, which should differ between processes
    (in `shard`, None not to compare them), unless they hold one value only, as made-up data.

    Attributes:
        looks_at: after how many updates :meth:`look` is due; never where there is one process.
        is_pending: whether :meth:`check` is due before the next update.
    """

    def __init__(self, net: mx.gluon.Block, trainer: mx.gluon.Trainer, shard: Nested | None) -> None:
        self._net, self._trainer, self.is_pending = net, trainer, False
        self.looks_at = 1 if is_distributed(trainer._kvstore) else math.inf
        self._sum = BackgroundSum(trainer._kvstore, WEIGHTS_DIGEST, 2 * DIGEST_BITS)
        self._sums: mx.nd.NDArray  # an array that becomes the sums of the bits
        self._inputs = next((leaf for _, leaf in leaves(shard) if isinstance(leaf, nd.NDArray)), None)

    def look(self, num_updates: int) -> None:
        self.looks_at = _after(num_updates, 1024)
        weights = [parameter.list_data()[0] for parameter in trainable(self._trainer)]
        inputs = nd.zeros(DIGEST_BITS, ctx=mx.cpu(), dtype="float64")
        if self._inputs is not None:
            flat = as_legacy(self._inputs).astype("float32")
            varies = (flat.max() != flat.min()).as_in_context(mx.cpu()).astype("float64")
            inputs = start_digest([self._inputs]) * varies
            self._inputs = None
        self._sums = self._sum.sum(nd.concat(start_digest(weights), inputs, dim=0))
        self.is_pending = True

    def check(self, num_updates: int) -> None:
        """Before the next update: read the last comparison. ReplicasDiffer, on every process: they have come apart."""
        self.is_pending = False
        store, sums = self._trainer._kvstore, self._sum.read(self._sums)
        equal = np.isin(sums, (0, store.num_workers))
        if not equal[:DIGEST_BITS].all():
            check_replicas(self._net, store)
            raise ReplicasDiffer(
                f"the trainer's parameters differ between the {store.num_workers} processes, seen after update "
                f"{num_updates}. Every process must update with the same gradients, learning rate and "
                "optimizer, and draw no noise of its own"
            )
        if equal[DIGEST_BITS:].all() and sums[DIGEST_BITS:].any() and store.rank == 0:
            warn(
                f"the first batch was the same on all {store.num_workers} processes: all do the same work. Each must "
                "have its part of the data: hand the loader to gp.prepare, or make gp.sampler.BatchSampler or "
                "gp.datasets.batches with rank=store.rank and num_workers=store.num_workers",
                SeparateTraining,
            )
