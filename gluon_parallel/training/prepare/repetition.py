"""Repetition of steps: which batches a step had, without their arrays, and its arguments as they are divided now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...compat import mx
from ...compat.array_types import leaves
from ...errors import BatchMismatch
from ...split import map_arrays
from .loaders import LoaderShard


class Step(NamedTuple):
    """A step that may have to be repeated."""

    number: int
    sources: dict[Any, int]  # passes over loaders -> which of their batches it had
    arguments: tuple  # nested as given; an empty array stands for each array
    places: list[tuple[Any, int]]  # for each of these arrays in turn: its pass, and its number in the batch


def note(number: int, arguments: tuple, loaders: Sequence[LoaderShard]) -> Step:
    """The step of that number with these arguments, without its arrays.

    Raises:
        BatchMismatch: an array is not one of the batch that a loader has yielded last.
    """
    passes = [loader.under_way for loader in loaders if loader.under_way is not None]
    places = {id(leaf): (one, place) for one in passes for place, leaf in enumerate(arrays_of(one.batch))}
    arrays = [(where, leaf) for where, leaf in leaves(arguments, "argument ") if _is_array(leaf)]
    strange = [where for where, leaf in arrays if id(leaf) not in places]
    sources = {places[id(leaf)][0] for _, leaf in arrays} if not strange else set()
    if not sources:
        what = f"{strange[0]} is no array of" if strange else "no argument is an array of"
        raise BatchMismatch(
            f"step: {what} the batch that a loader has yielded last, so it could not be divided anew among the "
            "processes that are left after a loss. Hand the loader to gp.survive or gp.prepare and the batch to "
            "the step as it comes from there; transform it in the data set, or inside of gp.survive's step"
        )
    taken: list[tuple[Any, int]] = []

    def left_out(array: Any) -> np.ndarray:
        taken.append(places[id(array)])
        return np.empty(0)

    kept = map_arrays(left_out, arguments)
    return Step(number, {one: one.number - 1 for one in sources}, kept, taken)


def read(step: Step) -> tuple:
    """The arguments of a step, of the batch as it is divided now."""
    for one, number in step.sources.items():
        if one.number != number:
            one.go_to(number)
        next(one)
    arrays = {one: arrays_of(one.batch) for one in step.sources}
    found = (arrays[source][number] for source, number in step.places)
    return map_arrays(lambda _: next(found), step.arguments)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (mx.nd.NDArray, np.ndarray))


def arrays_of(data: Any) -> list:
    """The arrays in nested data."""
    return [leaf for _, leaf in leaves(data) if _is_array(leaf)]
