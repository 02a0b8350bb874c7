"""State of a communication hook, or of compression by the store, in a checkpoint; for any number of processes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...archive import Archive, described
from ...communication_hooks import StatefulHook
from ...communication_hooks.hook import HOOKS, RESTORED
from ...errors import CheckpointError
from ...kvstore.contract import contract
from ...kvstore.protocols import CompressedSums, offers
from ...mxnet.compat import mx
from ...mxnet.compat.array_types import BFLOAT16
from ...mxnet.trainers import compression_of, parameters_of, store_of

_ERRORS, _SHARED, _RESIDUALS = "hook/errors/", "hook/shared/", "hook/residuals/"


def keeps_own_values(trainer: mx.gluon.Trainer) -> bool:
    """Whether each process keeps values of its own for later updates, as :func:`state_of_hook` returns them."""
    compression = dict(compression_of(trainer) or {})
    return _hook_of(trainer) is not None or compression.get("type") == "2bit"


def state_of_hook(trainer: mx.gluon.Trainer, names: list[str]) -> dict[str, np.ndarray]:
    """What is kept for the gradients of later updates, by all processes; all call it.

    Returns {"hook/errors/NAME": (num_workers, ...), "hook/shared/NAME": array} of a hook, {"hook/residuals/NAME":
    (num_workers, n)} of the store, or {}; `names` are those of the trainer's parameters.
    """
    hook, store = _hook_of(trainer), store_of(trainer)
    if hook is not None:
        own = {_ERRORS + names[number]: error for number, error in sorted(hook.errors.items())}
        found = {_SHARED + names[number]: array.asnumpy() for number, array in hook.shared.items()}
    else:
        residuals = store.residuals(trainer) if offers(store, CompressedSums) else {}
        own = {_RESIDUALS + names[key]: _copy(residuals[key]) for key in range(len(names)) if key in residuals}
        found = {}
    hooks: Any = contract(store)  # of this process alone, too
    for key, array in own.items():
        rows = mx.nd.empty((hooks.num_workers, *array.shape), dtype=array.dtype)
        hooks.allgather(key, array, rows)
        found[key] = rows.asnumpy()
    return found


def check_hook(archive: Archive, trainer: mx.gluon.Trainer, names: list[str], source: str) -> None:
    """CheckpointError: what :func:`restore_hook` puts back does not fit the trainer's parameters."""
    for name, parameter in zip(names, parameters_of(trainer)):
        size = int(np.prod(parameter.shape))  # a hook may keep what is left of a gradient in another shape
        for key, row in ((_ERRORS + name, size), (_RESIDUALS + name, size), (_SHARED + name, None)):
            array = archive.arrays.get(key)
            if array is None:
                continue
            has_rows = row is None or (array.shape[:1] > (0,) and array[0].size == row)
            if not has_rows or (array.dtype.kind != "f" and array.dtype != BFLOAT16):
                wanted = "numbers" if row is None else f"numbers, {row} of each process"
                raise CheckpointError(f"{source} is damaged: {key} is {described(array)}, wanted {wanted}")


def restore_hook(archive: Archive, trainer: mx.gluon.Trainer, names: list[str]) -> None:
    """Put what :func:`state_of_hook` returned back into the trainer's hook, the one that it will get, or its store.

    What the processes have left out counts by its sum: other processes than there were take equal parts of it.
    """
    hook, store = _hook_of(trainer), store_of(trainer)
    rank, num = (0, 1) if store is None else (store.rank, store.num_workers)

    def part(rows: np.ndarray) -> np.ndarray:
        return rows[rank] if len(rows) == num else (rows.sum(axis=0, dtype=np.float64) / num).astype(rows.dtype)

    errors, shared, residuals = (
        {number: archive.arrays[kind + name] for number, name in enumerate(names) if kind + name in archive.arrays}
        for kind in (_ERRORS, _SHARED, _RESIDUALS)
    )
    restored = (
        {number: _copy(part(rows)) for number, rows in errors.items()},
        {number: _copy(array) for number, array in shared.items()},
    )
    if hook is None:
        RESTORED.set(trainer, restored)
    else:
        hook.errors, hook.shared = restored
    if offers(store, CompressedSums):
        store.set_residuals({number: part(rows).copy() for number, rows in residuals.items()}, trainer)


def _hook_of(trainer: mx.gluon.Trainer) -> StatefulHook | None:
    return HOOKS.of(trainer)


def _copy(array: np.ndarray) -> mx.nd.NDArray:
    return mx.nd.array(array, dtype=array.dtype)
