"""Snapshot of what a step changes before its update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from ..allreduce import gradients
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import as_legacy
from ..mxnet.parameters import call_with_first_values, has_values, waits_for_shape
from ..mxnet.trainers import has_made_store, loss_scaler_of, set_progress_of_store, waiting_for_store


def snapshot(changing: Sequence[Any], trainer: mx.gluon.Trainer) -> Callable[[], None]:
    """Copy these parameters and the trainer's own state; returns the function that puts both back."""
    alike: dict[tuple, list[Any]] = {}  # arrays of one device and dtype: one operator copies them
    for parameter in changing:
        for array in map(as_legacy, parameter.list_data()) if has_values(parameter) else ():
            alike.setdefault((array.context, array.dtype), []).append(array)
    copies = [(arrays, mx.nd.concat(*(array.reshape(-1) for array in arrays), dim=0)) for arrays in alike.values()]
    scaler = loss_scaler_of(trainer)
    scale = None if scaler is None else dict(vars(scaler))
    begun = has_made_store(trainer), list(waiting_for_store(trainer))
    drawn: list[tuple[Any, Any]] = []  # (parameter, its first values), where the step itself draws them
    for parameter in changing:
        if waits_for_shape(parameter):
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
        set_progress_of_store(trainer, *begun)
        gradients.forget(one for one in gradients.trainable(trainer) if has_values(one))

    return put_back


def _note_first_values(parameter: Any, drawn: list[tuple[Any, Any]]) -> None:
    """Add a parameter and a copy of its values to `drawn` when it is initialised, with the first batch."""
    call_with_first_values(parameter, lambda values: drawn.append((parameter, as_legacy(values).copy())))
