"""Base class of data sets of image files: an index of those that can be read, a report of the others."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..compat import mx
from ..errors import DatasetCorrupt
from .image_files import BrokenSample, DataError, in_threads, read_image

BROKEN = ("raise", "skip")  # what becomes of a sample whose files cannot be read


_EXAMPLES = 3  # of each kind of error are named


class Report(NamedTuple):
    """How many samples a data set has, and what was left out or altered; ``print(report)`` says it in words.

    Example:
        >>> print(Report("voc train", 8, 21, [DataError("box without area", "a.xml", "box 2")]))
        voc train: 8 images, 21 boxes
          box without area: 1 (a.xml: box 2)
    """

    name: str  # of the data set
    num_samples: int  # that can be used
    num_boxes: int | None  # on them, or None where there are none to count
    data_errors: list[DataError]

    @property
    def counts(self) -> dict[str, int]:
        """How often each kind of error occurred."""
        return dict(Counter(error.kind for error in self.data_errors))

    def __str__(self) -> str:
        boxes = "" if self.num_boxes is None else f", {self.num_boxes} boxes"
        return f"{self.name}: {self.num_samples} images{boxes}{in_lines(self.data_errors, ', image left out')}"


def in_lines(data_errors: Iterable[DataError], effect: str = "") -> str:
    """A line for each kind of error; `effect` is that of one that breaks its sample."""
    kinds: dict[str, list[DataError]] = {}
    for error in data_errors:
        kinds.setdefault(error.kind, []).append(error)
    lines = ""
    for kind, alike in kinds.items():
        named = "; ".join(": ".join(filter(None, (error.where, error.detail))) for error in alike[:_EXAMPLES])
        more = f"; and {len(alike) - _EXAMPLES} more" if len(alike) > _EXAMPLES else ""
        lines += f"\n  {kind}{effect if alike[0].broken else ''}: {len(alike)} ({named}{more})"
    return lines


class Entry(NamedTuple):
    """An image of the index."""

    image: Path
    label: Any  # of an image with boxes its label, of one with a mask the mask's path
    image_id: Any = None  # COCO's


class IndexedDataset(mx.gluon.data.Dataset):
    """What the readers of boxes and of masks share.

    All files are looked at when a data set is made: one that cannot be read stops the program there, or is left out and
    counted, and training is never stopped by it.

    Args:
        broken: "raise" an error if an image or its annotation cannot be read, or "skip" it and count it.
        in_memory: keep all images decoded.

    Attributes:
        classes: what class 0, 1, ... is called.
        report: what was found while the index was built; a script prints it.
    """

    classes: tuple[str, ...]
    report: Report
    _has_boxes = False

    def _build(self, name, inspect, items, stray=(), broken="raise", in_memory=False):
        """Build the index with ``inspect(item)``: an entry and its errors, or BrokenSample. `stray` are of no image."""

        def look(item):
            try:
                return inspect(item)
            except BrokenSample as sample:
                return None, [sample.error]

        if broken not in BROKEN:
            raise ValueError(f"{name}: broken={broken!r} is none of {', '.join(map(repr, BROKEN))}")
        found = in_threads(look, items)
        data_errors = [*(error for _, some in found for error in some), *stray]
        unusable = [error for error in data_errors if error.broken]
        if unusable and broken == "raise":
            raise DatasetCorrupt(
                f"{name}: {len(unusable)} images cannot be used; mend or remove them, or leave them out with "
                f"broken='skip':{in_lines(unusable)}"
            )
        self._entries = [entry for entry, _ in found if entry is not None]
        num_boxes = sum(len(entry.label) for entry in self._entries) if self._has_boxes else None
        self.report = Report(name, len(self._entries), num_boxes, data_errors)
        if not self._entries:
            raise DatasetCorrupt(f"no image is left, so there is nothing to train with. {self.report}")
        self._kept = in_threads(self._read, self._entries) if in_memory else None

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Any:
        return self._read(self._entries[index]) if self._kept is None else self._kept[index]

    def first(self, number: int):
        """The same data set with its first `number` images only (or all, if there are fewer), for trying things."""
        return self._only(list(range(len(self)))[:number])

    def _only(self, indices):
        if not indices:
            raise DatasetCorrupt(f"no image is left of them. {self.report}")
        part = copy.copy(self)
        part._entries = [self._entries[index] for index in indices]
        part._kept = None if self._kept is None else [self._kept[index] for index in indices]
        return part

    def _read(self, entry: Entry) -> Any:
        image = read_image(entry.image)
        image.setflags(write=False)  # the same whether it is read anew each time or kept
        return image


def those_there(names: Iterable[str]) -> str:
    """For an error: what there is in the place of what is missing."""
    there = sorted(names)
    return f"there are {', '.join(there[:9])}" if there else "nor any other; is this the right folder?"


def check_size(stated: Iterable[Any], size: tuple[int, int], where: object, kind: str) -> None:
    """Refuse a sample whose annotation or mask states another width and height than its image has."""
    width, height = map(number, stated)
    if np.isfinite(width * height) and width and height and (width, height) != size:  # some write 0, or nothing
        detail = f"{width:g}x{height:g}, but the image is {size[0]}x{size[1]}"
        raise BrokenSample(kind, where, detail)


def number(value: Any) -> float:
    """NaN for what is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
