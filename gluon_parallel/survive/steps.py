"""Steps that may be repeated: which batches each had, as they are divided now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple, Protocol

import numpy as np

from ..errors import BatchMismatch
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import leaves
from ..split import map_items


class Loader(Protocol):
    """This process's part of a loader, which is divided anew when there are fewer or more processes."""

    epoch: int  # of the next pass
    between: Callable[[], None]  # called between two batches of a pass

    @property
    def under_way(self) -> Any:
        """The pass that is under way, with its last `batch`, the `number` of the next one, and ``go_to(number)``."""

    @property
    def position(self) -> Sequence[int]:
        """What :meth:`set_epoch` needs to go on here."""

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Begin the next pass as that of `epoch`, behind `start` batches."""

    def divide(self, rank: int, num_workers: int) -> None:
        """Read the part of process `rank` from the next batch on."""


class Step(NamedTuple):
    """A step that may have to be repeated."""

    number: int
    sources: dict[Any, int]  # passes over loaders -> which of their batches it had
    arguments: tuple  # nested as given; a `_BatchItem` stands for each part of a batch


class _BatchItem(NamedTuple):
    """Where a part of a batch is: an array, or a nested tuple, list or dict, whose length may be another one later."""

    source: Any  # pass over a loader
    path: tuple[tuple[Any, int], ...]  # keys, and the length of what each is looked up in

    def read(self) -> Any:
        """What is there in the batch that was read last."""
        found = self.source.batch
        for key, length in self.path:
            if len(found) != length:
                raise BatchMismatch(
                    f"step: a batch that was divided anew has {len(found)} parts where it had {length}, of which the "
                    "step was given some; hand it all of them in the list or tuple that the loader yields"
                )
            found = found[key]
        return found


def record_step(number: int, arguments: tuple, loaders: Sequence[Loader]) -> Step:
    """A step as it can be repeated; BatchMismatch: one of its arrays is not of the batch that a loader yielded last."""
    passes = [loader.under_way for loader in loaders if loader.under_way is not None]
    items = {id(part): _BatchItem(source, path) for source in passes for path, part in _items(source.batch)}
    sources: dict[Any, int] = {}

    def marked_item(data: Any) -> Any:
        item = items.get(id(data))
        if item is None:
            return map_items(marked_item, data)
        sources[item.source] = item.source.number - 1
        return item

    marked = tuple(map(marked_item, arguments))
    strange = [where for where, leaf in leaves(_without_items(marked), "argument ") if _is_array(leaf)]
    if strange or not sources:
        what = f"{strange[0]} is no array of" if strange else "no argument is an array of"
        raise BatchMismatch(
            f"step: {what} the batch that a loader has yielded last, so it cannot be divided anew after a loss. Hand "
            "the loader to gp.survive or gp.prepare, and the batch to the step as it comes from there; transform it in "
            "the data set, or inside of gp.survive's step"
        )
    return Step(number, sources, marked)


def arguments_of(step: Step) -> tuple:
    """The arguments of a step, of the batch as it is divided now."""
    for source, number in step.sources.items():
        if source.number != number:
            source.go_to(number)
        next(source)
    return tuple(map(_filled, step.arguments))


def _filled(data: Any) -> Any:
    return data.read() if isinstance(data, _BatchItem) else map_items(_filled, data)


def _without_items(data: Any) -> Any:
    return None if isinstance(data, _BatchItem) else map_items(_without_items, data)


def _items(data: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """(path, part) of nested data: its arrays, and tuples, lists and dicts, but for the one empty tuple of Python."""
    if _is_array(data) or (isinstance(data, (tuple, list, dict)) and data != ()):
        yield path, data
    if isinstance(data, (tuple, list, dict)):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _items(value, (*path, (key, len(data))))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (mx.nd.NDArray, np.ndarray))


def arrays_of(data: Any) -> list:
    """The arrays in nested data."""
    return [leaf for _, leaf in leaves(data) if _is_array(leaf)]
