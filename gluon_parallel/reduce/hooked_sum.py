"""Sum of gradients over the processes by a communication hook."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..allreduce import allreduce_each
from ..communication_hooks import BucketStore, GradientBucket, StatefulHook, StoreCompression
from ..communication_hooks.hook import HOOKS
from ..errors import ArrayMismatch, CompressionFault, GradientUnavailable, warn
from ..kvstore.contract import is_distributed
from ..kvstore.factory import kind_of
from ..kvstore.mpi.plan import assign_buckets
from ..kvstore.protocols import Hooks, offers
from ..mxnet.attached import Attached
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import as_legacy, to_device
from ..mxnet.engine import make_plain
from ..mxnet.parameters import gradient_storage
from ..mxnet.trainers import compression_of, has_made_store, parameters_of, set_compression, store_of
from .reducer import sum_by_hook

_BUCKET = 25 << 20  # bytes
_compressed: Attached[bool] = Attached("compressed")  # trainers whose compression_params are those of a hook


def connect(trainer: mx.gluon.Trainer, hook: Any, store: Any) -> None:
    """Have steps of this trainer sum by `hook`, or, where it is None or compression by the store, as its store does.

    Args:
        store: the trainer's, which it may not have made yet, its name, or None.

    Raises:
        ValueError: it is no hook, or cannot be used with this trainer, store or launch.
        GradientUnavailable: a gradient is sparse.
    """
    _take_back(trainer, store)
    if hook is None:
        return
    where = f"communication_hook={hook!r}"
    if not callable(hook) and not isinstance(hook, StoreCompression):
        raise ValueError(f"{where}: expected one of gp.communication_hooks, or a function of (bucket, store)")
    if compression_of(trainer):
        raise ValueError(f"{where}: the trainer has compression_params={compression_of(trainer)!r}; use one of them")
    kind = kind_of(store)
    if not offers(kind, Hooks) and (kind is not None or is_distributed(store)):
        raise ValueError(
            f"{where}: hooks need the store mpi, and the trainer's is {getattr(store, 'type', store)!r}; leave it "
            "out, or start the processes with gluon-parallel launch and make the store by gp.kvstore.create('mpi')"
        )
    is_for_several = isinstance(hook, StoreCompression) or getattr(hook, "only_between_processes", False)
    if is_for_several and not is_distributed(store):
        warn(
            f"{where}: gradients are compressed on their way to other processes, and this process is alone, so they "
            "are not. Over several processes the results will differ from these; for the same ones, leave it out",
            CompressionFault,
        )
        return
    if isinstance(hook, StoreCompression):
        set_compression(trainer, hook.compression_params)
        _compressed.set(trainer, True)
        if has_made_store(trainer):
            store.set_gradient_compression(hook.compression_params, trainer)
        return
    sparse = [parameter.name for parameter in parameters_of(trainer) if gradient_storage(parameter) != "default"]
    if sparse:
        raise GradientUnavailable(
            f"{where}: hooks get dense gradients, and that of {sparse[0]} is row_sparse; build the layer with "
            "sparse_grad=False, or leave the hook out"
        )
    sum_by_hook(trainer, HookedSum(trainer, hook))


def _take_back(trainer: mx.gluon.Trainer, store: Any) -> None:
    """The hook of an earlier ``DataParallel`` does not sum or compress the trainer's gradients any more."""
    HOOKS.pop(trainer)
    sum_by_hook(trainer, None)
    if _compressed.pop(trainer):
        set_compression(trainer, None)
        if has_made_store(trainer):
            store.set_gradient_compression({"type": "none"}, trainer)


class HookedSum:
    """Sums the gradients of `trainer` by `hook`, bucket by bucket."""

    def __init__(self, trainer: mx.gluon.Trainer, hook: Any) -> None:
        self._trainer, self._hook = trainer, hook
        self._kept: tuple[dict, dict] = {}, {}
        if isinstance(hook, StatefulHook):
            hook.belong_to(trainer)

    def sum(self, parameters: Sequence[mx.gluon.Parameter], divisor: float) -> None:
        """All copies of the gradients of `parameters` become the hook's sum of them; see :class:`GradientBucket`."""
        trainer, hook = self._trainer, self._hook
        number_of = {id(parameter): number for number, parameter in enumerate(parameters_of(trainer))}
        copies = [list(map(as_legacy, parameter.list_grad())) for parameter in parameters]
        if copies and len(copies[0]) > 1:
            allreduce_each(copies)
        if isinstance(hook, StatefulHook):
            self._kept = dict(hook.errors), dict(hook.shared)
        own = [_on_host(gradients[0]) for gradients in copies]
        make_plain(*own)
        sizes = [array.size * np.dtype(array.dtype).itemsize for array in own]
        kinds = [np.dtype(array.dtype).name for array in own]
        for index, members in enumerate(assign_buckets(sizes, kinds, following=_BUCKET, alone=_BUCKET)):
            names = [parameters[member].name for member in members]
            numbers = [number_of[id(parameters[member])] for member in members]
            bucket = GradientBucket(
                numbers, names, [own[member] for member in members], divisor, trainer.optimizer.num_update
            )
            # Of these parameters: with ignore_stale_grad, other updates may have others.
            key = f"hook {zlib.crc32(repr(numbers).encode()):08x}"
            try:
                sums = _checked(hook(bucket, BucketStore(store_of(trainer), key, priority=-index)), bucket, hook)
            except BaseException:  # Ctrl-C too
                self.undo()
                raise
            for member, array in zip(members, sums):
                for gradient in copies[member]:
                    if array is not gradient:
                        gradient[:] = array.astype(gradient.dtype, copy=False).as_in_context(gradient.context)

    def undo(self) -> None:
        """The last sum is not used: what the hook keeps is as it was before."""
        if isinstance(self._hook, StatefulHook):
            self._hook.errors, self._hook.shared = self._kept


def _on_host(gradient: mx.nd.NDArray) -> mx.nd.NDArray:
    wide = gradient if np.dtype(gradient.dtype).itemsize > 2 else gradient.astype("float32")
    return to_device(wide, mx.cpu(0)) if wide.context.device_type == "gpu" else wide


def _checked(sums: Any, bucket: GradientBucket, hook: Any) -> list[mx.nd.NDArray]:
    """What the hook has returned, if it is alike to the gradients that it got."""
    where = f"communication_hook={hook!r}"
    if not isinstance(sums, (list, tuple)) or len(sums) != len(bucket.gradients):
        got = f"{len(sums)} of them" if isinstance(sums, (list, tuple)) else repr(sums)
        raise ArrayMismatch(f"{where}: expected a list of {len(bucket.gradients)} arrays, one per gradient, got {got}")
    for name, array, gradient in zip(bucket.names, sums, bucket.gradients):
        if not isinstance(array, mx.nd.NDArray) or (array.shape, array.dtype) != (gradient.shape, gradient.dtype):
            got = f"{array.shape} {np.dtype(array.dtype).name}" if isinstance(array, mx.nd.NDArray) else repr(array)
            wanted = f"an NDArray {gradient.shape} {np.dtype(gradient.dtype).name}"
            raise ArrayMismatch(f"{where}: in the place of the gradient of {name} expected {wanted}, got {got}")
    return list(map(as_legacy, sums))
