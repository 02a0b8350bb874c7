"""Checks that weights are finite, and the same on all devices and processes; while training, in the background."""

from __future__ import annotations

import collections
import math
import operator
import zlib
from collections.abc import Sequence

import numpy as np

from ..allreduce.gradients import trainable
from ..errors import NotFinite, ReplicasDiffer, SeparateTraining, warn
from ..kvstore import as_store, together
from ..kvstore.collective import gather
from ..kvstore.contract import contract, is_distributed
from ..mxnet.arrays import addresses_of
from ..mxnet.blocks import options_of, own_parameters, parameters_by_structure
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import Nested, as_legacy, leaves, to_device
from ..mxnet.engine import Call, check, make_plain, may_be_blocked, push, reorder, view
from ..mxnet.parameters import has_values, values_of
from ..mxnet.trainers import store_of
from ..native import address
from ..native.records import C, address_of
from ..nn.blocks import blocks_of
from ..nn.sync_batch_norm.participants import STATISTICS
from ..reduce.reducer import reducer_of
from ..reduce.step_header import DIGEST_BITS, StepHeader
from .first_step import outside
from .precision import all_finite

nd = mx.nd

_ADVICE = (
    "Equal weights stay equal if every process starts from the same ones and adds up its gradients with the others: "
    "write gluon.Trainer(..., kvstore=store), load checkpoints on all processes, and give all the same learning rate"
)
_LAG = 10  # updates after which the result of a look is read: losses are read eight steps later, and shall come first


def _after(num_updates: int, longest: int) -> int:
    """The next of the updates 1, 2, 4, ..., and every `longest`-th from then on."""
    return num_updates + min(num_updates, longest)


# Searches that wait in the engine. This set keeps their memory alive: kept by their owner alone, which may be part of a
# reference cycle, the garbage collector could free the arrays while the engine reads them.
_under_way: set[_Look] = set()
_DTYPES = {np.dtype(np.float32): C.FLOAT32, np.dtype(np.float64): C.FLOAT64}


class _Look:
    """A look for NaN and infinity in some arrays, which can be started again when its result has been read."""

    def __init__(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        self._arrays, self._end = list(arrays), nd.empty(1, ctx=mx.cpu())  # which is there when the look has ended
        is_in_c = [array.ctx.device_type != "gpu" and np.dtype(array.dtype) in _DTYPES for array in arrays]
        self._on_host = [array for array, here in zip(arrays, is_in_c) if here and array.size]
        self._others = [array for array, here in zip(arrays, is_in_c) if not here]
        self._blocked = list(filter(may_be_blocked, self._on_host))
        self._others_are_finite: mx.nd.NDArray | None = None
        handles = addresses_of(self._on_host)
        sizes = [array.size for array in self._on_host]
        dtypes = [_DTYPES[np.dtype(array.dtype)] for array in self._on_host]
        self._memory = [np.array(one, np.int64) for one in (handles, sizes, dtypes)]
        self._record = C.FiniteLook(len(sizes), *map(address_of, self._memory))
        function, record = address("gp_find_finite"), address_of(self._record)
        self._call = Call(function, record, self._on_host, [self._end], "finite weights", at_once=False)

    def is_of(self, arrays: Sequence[mx.nd.NDArray]) -> bool:
        """Whether it looks at these arrays."""
        return len(arrays) == len(self._arrays) and all(map(operator.is_, arrays, self._arrays))

    def start(self) -> None:
        """Look when the arrays are ready; does not wait."""
        _under_way.difference_update([look for look in _under_way if look._record.has_ended])
        reorder(self._blocked)
        self._record.has_ended = 0
        _under_way.add(self)
        self._call.push()
        self._others_are_finite = all_finite(self._others) if self._others else None

    def result(self) -> bool:
        """Whether no value is NaN or infinite; waits."""
        if not self._record.has_ended:
            self._end.wait_to_read()
        others = self._others_are_finite
        return bool(self._record.is_finite) and (others is None or bool(others.asscalar()))


class FiniteWeights:
    """Looks for NaN and infinity in the weights after updates 1, 2, 4, 8 and every 8th from then on.

    The engine reads the first device's weights while the next steps run, and the result is read before the tenth update
    that follows, on every process: a NaN, which stays, ends the training after at most 16 more updates.
    `accumulate` steps make an update, and `updates_before` were made before.

    Attributes:
        next_look: after how many updates :meth:`look` is due.
        next_read: before which update :meth:`check` is due.
    """

    def __init__(self, trainer: mx.gluon.Trainer, accumulate: int, updates_before: int = 0) -> None:
        self._trainer, self._accumulate, self._updates_before = trainer, accumulate, updates_before
        self.next_look, self.next_read, self._before = 1, math.inf, 0
        self._pending: collections.deque[tuple[int, _Look]] = collections.deque()  # after which update it looked
        self._done: list[_Look] = []  # to be used again

    def look(self, num_updates: int) -> None:
        """Start a look at the weights after that many updates; does not wait."""
        self.next_look = _after(num_updates, 8)
        self._start(num_updates)

    def check(self, num_updates: int, last: bool = False) -> None:
        """After that many updates, before the next one: read the result of the look ten updates before it, if any.

        If no update follows (`last`), look at the weights of the last one, and read all results.
        """
        if last and num_updates > max([self._before, *(looked for looked, _ in self._pending)]):
            self._start(num_updates)
        while self._pending and (last or self._pending[0][0] + _LAG <= num_updates + 1):
            looked, look = self._pending.popleft()
            is_finite = look.result()
            self._done.append(look)
            self.next_read = self._pending[0][0] + _LAG if self._pending else math.inf
            if not is_finite:
                check()  # where an exchange failed, the sum is NaN, and its error says why
                self._raise(looked)
            self._before = looked

    def _start(self, num_updates: int) -> None:
        weights = [copies[0] for copies in reducer_of(self._trainer).weights]
        look = self._done.pop() if self._done else _Look(weights)
        if not look.is_of(weights):
            look = _Look(weights)
        look.start()
        self._pending.append((num_updates, look))
        self.next_read = self._pending[0][0] + _LAG

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

    They are those of the trainer, and others of the net that have gradients, such as weights that a loop averages.
    The engine computes the checksum while the next step begins, whose header sums its bits; the result is read at the
    next update. The first comparison includes the inputs of the first step, which should differ between processes
    (`shard` are those inputs; None: do not compare them), unless they hold one value only, as made-up data.

    Attributes:
        next_look: after how many updates :meth:`look` is due; never where there is one process.
        bits: (2 * DIGEST_BITS,), of the last look, for the next header; None if there is nothing to send.
    """

    def __init__(self, net: mx.gluon.Block, trainer: mx.gluon.Trainer, shard: Nested | None) -> None:
        self._net, self._trainer = net, trainer
        self.next_look = 1 if is_distributed(store_of(trainer)) else math.inf
        self.bits: mx.nd.NDArray | None = None
        self._inputs = next((leaf for _, leaf in leaves(shard) if isinstance(leaf, nd.NDArray)), None)

    def look(self, num_updates: int) -> None:
        """Start the checksum of the weights after that many updates; does not wait."""
        self.next_look = _after(num_updates, 1024)
        others = [
            one for one in outside(self._net, self._trainer).values() if one.grad_req != "null" and values_of(one)
        ]
        weights = [parameter.list_data()[0] for parameter in (*trainable(self._trainer), *others)]
        inputs = nd.zeros(DIGEST_BITS, ctx=mx.cpu(), dtype="float64")
        if self._inputs is not None:
            flat = as_legacy(self._inputs).astype("float32")
            varies = (flat.max() != flat.min()).as_in_context(mx.cpu()).astype("float64")
            inputs = start_digest([self._inputs]) * varies  # zeros for constant inputs: nothing is warned of
            self._inputs = None
        self.bits = nd.concat(start_digest(weights), inputs, dim=0)

    def write(self, header: StepHeader) -> None:
        """Write the bits to the header; waits for them."""
        assert self.bits is not None
        header.own["digest"] = self.bits.asnumpy()

    def check(self, num_updates: int, sums: np.ndarray) -> None:
        """Before the next update: compare by the header's `sums`. ReplicasDiffer, on every process: they differ."""
        self.bits, store = None, store_of(self._trainer)
        equal = np.isin(sums, (0, store.num_workers))  # a bit that all processes have sums to their number
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


def check_replicas(net: mx.gluon.Block, store: mx.kv.KVStoreBase | None = None) -> None:
    """Raise an error unless all devices, and all processes, hold the same parameters.

    Call it in a loop of your own, on every process, after a step or once per epoch. It waits for the parameters and
    reads them once (checksums travel, not weights). It looks at frozen parameters too, also where the trainer does not
    hold them, and at running statistics of batch norm with ``use_global_stats=True``. Other running statistics are left
    out: with plain BatchNorm they are those of each device. So are parameters that have no values yet.

    Args:
        net: the block whose parameters are compared.
        store: the KVStore through which the processes meet; None compares the devices of this process alone.

    Raises:
        ReplicasDiffer: on every process; names the first parameter that differs and who holds what. Where devices of
            one process alone differ, that process names it, and the others name the process.
        WorkersDiffer, BarrierTimeout, WorkerLost: another process has other parameters, or did not call it in time.

    Example:
        >>> net = mx.gluon.nn.Dense(1, in_units=1, prefix="dense_")
        >>> net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
        >>> check_replicas(net)
        >>> net.weight.data(mx.cpu(1))[:] = 7
        >>> check_replicas(net)
        Traceback (most recent call last):
        gluon_parallel.errors.ReplicasDiffer: parameter weight differs between cpu(0) and cpu(1)...
    """
    constant = [block for block in blocks_of(net) if options_of(block).get("use_global_stats")]
    kept = {id(parameter) for block in constant for parameter in own_parameters(block).values()}
    parameters = {
        name: parameter
        for name, parameter in parameters_by_structure(net).items()
        if has_values(parameter) and (id(parameter) in kept or not parameter.name.endswith(STATISTICS))
    }
    copies = {name: [_digest(data.asnumpy()) for data in one.list_data()] for name, one in parameters.items()}
    apart = [name for name, digests in copies.items() if len(set(digests)) > 1]
    own = np.array([*(digests[0] for digests in copies.values()), bool(apart)], np.float64)
    rows = own[None]
    numbers: Sequence[int] = [0]
    if store is not None:
        rows = together(store, lambda: gather(as_store(store, "check_replicas"), "gp.check_replicas()", own))
        numbers = contract(store).ranks
    differ = (rows[:, :-1] != rows[0, :-1]).any(axis=0)
    if differ.any():
        number = int(np.argmax(differ))
        raise ReplicasDiffer(
            f"parameter {list(copies)[number]} differs between the processes {_groups(numbers, rows[:, number])}"
            f"{_more(differ.sum())}. {_ADVICE}"
        )
    if apart:
        first = copies[apart[0]]
        other = next(index for index, digest in enumerate(first) if digest != first[0])
        devices = parameters[apart[0]].list_ctx()
        raise ReplicasDiffer(
            f"parameter {apart[0]} differs between {devices[0]} and {devices[other]}{_more(len(apart))}. Set weights "
            "with parameter.set_data(array), which sets all devices, and sum the gradients of all devices in every step"
        )
    if rows[:, -1].any():
        where = ", ".join(str(numbers[rank]) for rank in np.flatnonzero(rows[:, -1]).tolist())
        raise ReplicasDiffer(
            f"parameters differ between the devices of process {where}, whose error names the first one"
        )


def start_digest(arrays: Sequence[mx.nd.NDArray]) -> mx.nd.NDArray:
    """Queue a checksum of dense arrays; the array becomes its bits, (DIGEST_BITS,) float64 on the CPU."""
    on_host = [to_device(array, mx.cpu(0)) if array.ctx.device_type == "gpu" else array for array in arrays]
    make_plain(*on_host)
    bits = mx.nd.zeros(DIGEST_BITS, ctx=mx.cpu(), dtype="float64")

    def compute() -> None:
        digest = 0
        for array in on_host:
            digest = _digest(view(array), digest)
        view(bits)[:] = [digest >> position & 1 for position in range(DIGEST_BITS)]

    push(compute, read=on_host, write=[bits], name="digest")
    return bits


def _digest(array: np.ndarray, before: int = 0) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, before)


def _groups(numbers: Sequence[int], digests: np.ndarray) -> str:
    """Which processes hold the same, such as "0, 2 | 1"."""
    found: dict[float, list[int]] = {}
    for number, digest in zip(numbers, digests.tolist()):
        found.setdefault(digest, []).append(number)
    return " | ".join(", ".join(map(str, group)) for group in found.values())


def _more(count: int) -> str:
    return f", and {count - 1} more do" if count > 1 else ""
