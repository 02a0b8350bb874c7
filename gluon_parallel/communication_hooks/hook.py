"""Communication hooks: what they get, a bucket of gradients and a store; hooks with state; compression by the store."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..kvstore.contract import contract, is_distributed
from ..mxnet.attached import Attached
from ..mxnet.compat import mx

# Of trainers: the hook with state that sums its gradients, and (errors, shared) of a checkpoint for the next one.
HOOKS: Attached[StatefulHook] = Attached("hook")
RESTORED: Attached[tuple[dict[int, Any], dict[int, Any]]] = Attached("restored_hook")


class GradientBucket(NamedTuple):
    """Gradients of some of a net's parameters, of one process and one update.

    The processes' buckets are alike: the same parameters in the same order. Gradients come layer by layer from the
    net's end on, in float32, or in float64 where the parameters are.
    """

    numbers: Sequence[int]  # of the parameters in the trainer: the same on all processes
    names: Sequence[str]  # of the parameters
    # One NDArray on the CPU for each parameter, of its shape: the sum over this process's samples and devices, times
    # the loss scale of mixed precision. The hook may write to them.
    gradients: Sequence[mx.nd.NDArray]
    divisor: float  # samples of all processes times the loss scale: the mean gradient is the sum divided by it
    num_updates: int  # that the optimizer has made before


class BucketStore:
    """The exchanges of a communication hook with the same hook of the other processes.

    All processes make the same calls in the same order, with arrays of the same shapes and dtypes. A call returns at
    once; whoever reads the array that it returns waits.

    Args:
        store: the trainer's; None without one.
        key: of the bucket.
        priority: of its exchanges.

    Attributes:
        rank, num_workers: the number of this process, and how many there are.
    """

    def __init__(self, store: Any, key: str, priority: int = 0) -> None:
        self.rank, self.num_workers = contract(store).rank, contract(store).num_workers
        self._store, self._key, self._priority = store if is_distributed(store) else None, key, priority
        self._calls = itertools.count()

    def allreduce(self, array: mx.nd.NDArray) -> mx.nd.NDArray:
        """The sum over the processes of `array`, dense and on the CPU: a new array, with the same bits on all."""
        result = mx.nd.empty(array.shape, dtype=array.dtype)
        if self._store is None:
            array.copyto(result)
        else:
            self._store.pushpull(self._next_key(), [array], [result], self._priority)
        return result

    def allgather(self, array: mx.nd.NDArray) -> mx.nd.NDArray:
        """``(num_workers, *shape)``: row r is the array of process r, ``(*shape)``, dense, on the CPU."""
        result = mx.nd.empty((self.num_workers, *array.shape), dtype=array.dtype)
        if self._store is None:
            array.expand_dims(0).copyto(result)
        else:
            self._store.allgather(self._next_key(), array, result, self._priority)
        return result

    def _next_key(self) -> str:
        return f"{self._key} {next(self._calls)}"


class StatefulHook:
    """Base of hooks that keep arrays from one update to the next; checkpoints save these.

    A hook replaces an array and never writes to one of an earlier update: if an update is left out, for gradients that
    are not finite under loss scaling, the arrays of before it come back. It belongs to one ``DataParallel``.

    Attributes:
        errors: {number of a parameter: NDArray}: what this process has not sent yet, as a part of the mean gradient
            (a gradient divided by ``bucket.divisor``). Only their sum over the processes counts: if a checkpoint is
            continued by more or fewer processes, each takes an equal part of it.
        shared: {number of a parameter: NDArray}: what is the same on all processes.
        only_between_processes: whether a process that is alone leaves the hook out, with a warning.
    """

    only_between_processes = False

    def __init__(self) -> None:
        self.errors: dict[int, mx.nd.NDArray] = {}
        self.shared: dict[int, mx.nd.NDArray] = {}
        self._trainer: mx.gluon.Trainer | None = None

    def belong_to(self, trainer: mx.gluon.Trainer) -> None:
        """Sum the gradients of `trainer` from now on, and go on from what a checkpoint had for it.

        Raises ValueError: the hook belongs to another trainer.
        """
        if self._trainer not in (None, trainer):
            raise ValueError(f"communication_hook={self!r} belongs to another trainer; make one for each trainer")
        self._trainer = trainer
        HOOKS.set(trainer, self)
        restored = RESTORED.pop(trainer)
        if restored is not None:
            self.errors, self.shared = restored

    def __call__(self, bucket: GradientBucket, store: BucketStore) -> Sequence[mx.nd.NDArray]:
        """Return for each gradient of the bucket its sum over the processes, an NDArray of its shape and dtype."""
        raise NotImplementedError


class StoreCompression(NamedTuple):
    """A communication hook that is no function: the store ``mpi`` compresses, as by ``compression_params``."""

    compression_params: dict[str, Any]


float16 = StoreCompression({"type": "fp16"})
bfloat16 = StoreCompression({"type": "bf16"})


def two_bits(threshold: float = 0.5) -> StoreCompression:
    """MXNet's 2 bits: each process sends -threshold, 0 or threshold, and keeps the rest for later updates.

    Args:
        threshold: of the same size as a process's gradients, which are sums over its samples.

    Example:
        >>> two_bits(0.1).compression_params
        {'type': '2bit', 'threshold': 0.1}
    """
    return StoreCompression({"type": "2bit", "threshold": threshold})
