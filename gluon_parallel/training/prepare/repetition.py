"""Repetition of steps: which batches a step had, as they are divided now, and what it changes before its update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from ...allreduce import gradients
from ...errors import BatchMismatch
from ...mxnet.compat import mx
from ...mxnet.compat.array_types import as_legacy, leaves
from ...mxnet.parameters import call_with_first_values, has_values, waits_for_shape
from ...mxnet.trainers import has_made_store, loss_scaler_of, set_progress_of_store, waiting_for_store
from ...split import map_arrays
from .loaders import LoaderShard


class Step(NamedTuple):
    """A step that may have to be repeated."""

    number: int
    sources: dict[Any, int]  # passes over loaders -> which of their batches it had
    arguments: tuple  # nested as given; an empty array stands for each array
    places: list[tuple[Any, int]]  # for each of these arrays in turn: its pass, and its number in the batch


def note(number: int, arguments: tuple, loaders: Sequence[LoaderShard]) -> Step:
    """The step of that number with these arguments, without its arrays, which a loader has to have yielded last."""
    passes = [loader.under_way for loader in loaders if loader.under_way is not None]
    places = {id(leaf): (source, place) for source in passes for place, leaf in enumerate(arrays_of(source.batch))}
    arrays = [(where, leaf) for where, leaf in leaves(arguments, "argument ") if _is_array(leaf)]
    strange = [where for where, leaf in arrays if id(leaf) not in places]
    sources = {places[id(leaf)][0] for _, leaf in arrays} if not strange else set()
    if not sources:
        what = f"{strange[0]} is no array of" if strange else "no argument is an array of"
        raise BatchMismatch(
            f"step: {what} the batch that a loader has yielded last, so it cannot be divided anew after a loss. Hand "
            "the loader to gp.survive or gp.prepare, and the batch to the step as it comes from there; transform it in "
            "the data set, or inside of gp.survive's step"
        )
    places_in_turn: list[tuple[Any, int]] = []

    def left_out(array: Any) -> np.ndarray:
        places_in_turn.append(places[id(array)])
        return np.empty(0)

    without_arrays = map_arrays(left_out, arguments)
    return Step(number, {source: source.number - 1 for source in sources}, without_arrays, places_in_turn)


def read(step: Step) -> tuple:
    """The arguments of a step, of the batch as it is divided now."""
    for source, number in step.sources.items():
        if source.number != number:
            source.go_to(number)
        next(source)
    arrays = {source: arrays_of(source.batch) for source in step.sources}
    found = (arrays[source][number] for source, number in step.places)
    return map_arrays(lambda _: next(found), step.arguments)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (mx.nd.NDArray, np.ndarray))


def arrays_of(data: Any) -> list:
    """The arrays in nested data."""
    return [leaf for _, leaf in leaves(data) if _is_array(leaf)]


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
