"""Snapshot of what a step changes before its update is committed, to repeat the step from where it began."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from ...allreduce import gradients
from ...compat import mx
from ...compat.array_types import as_legacy


def snapshot(changing: Sequence[Any], trainer: mx.gluon.Trainer) -> Callable[[], None]:
    """Copy these parameters and the trainer's own state; returns the function that puts both back."""
    alike: dict[tuple, list[Any]] = {}  # arrays of one device and dtype: one operator copies them
    for parameter in changing:
        has_values = parameter._data is not None  # else its shape is not known yet
        for array in map(as_legacy, parameter.list_data()) if has_values else ():
            alike.setdefault((array.context, array.dtype), []).append(array)
    copies = [(arrays, mx.nd.concat(*(array.reshape(-1) for array in arrays), dim=0)) for arrays in alike.values()]
    scaler = getattr(trainer, "_amp_loss_scaler", None)
    scale = None if scaler is None else dict(vars(scaler))
    begun = trainer._kv_initialized, list(trainer._params_to_init)
    drawn: list[tuple[Any, Any]] = []  # (parameter, its first values), where the step itself draws them
    for parameter in changing:
        if parameter._deferred_init:
            _note_first_values(parameter, drawn)

    def put_back() -> None:
        for arrays, copy in copies:
            ends = np.cumsum([array.size for array in arrays]).tolist()
            for array, end in zip(arrays, ends):
                array[:] = copy[end - array.size : end].reshape(array.shape)
        for parameter, values in drawn:
            for array in map(as_legacy, parameter.list_data()):
                array[:] = values
        if scale is not None:
            vars(scaler).update(scale)
        trainer._kv_initialized, trainer._params_to_init = begun[0], list(begun[1])
        gradients.forget(one for one in gradients.trainable(trainer) if one._data is not None)

    return put_back


def _note_first_values(parameter: Any, drawn: list[tuple[Any, Any]]) -> None:
    """Add a parameter and a copy of its values to `drawn` when it is initialised, with the first batch."""

    def initialise(values: Any, devices: Any) -> None:
        del parameter._init_impl  # the method is there again
        drawn.append((parameter, as_legacy(values).copy()))
        parameter._init_impl(values, devices)

    parameter._init_impl = initialise
