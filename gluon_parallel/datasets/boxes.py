"""Labels from the boxes of an annotation; invalid boxes are left out and reported."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..compat import mx
from ..errors import DatasetCorrupt
from .data_errors import DataError, Report, refuse_broken
from .image_files import in_threads, read_image

COLUMNS = 6  # xmin, ymin, xmax, ymax, class, difficult
_SLIGHTLY = 0.5  # pixels beyond the edge that rounding explains; they are cut without a word


class Annotated(NamedTuple):
    """A box as a file has it."""

    edges: tuple[float, float, float, float]  # xmin, ymin, xmax, ymax: 0-based, the last pixels inclusive
    label: int | str  # the class's number, or what the file says when there is none such
    difficult: bool


class Entry(NamedTuple):
    """An image of the index."""

    path: Path
    label: np.ndarray  # (N, COLUMNS) float32


def as_label(boxes: Iterable[Annotated], size: tuple[int, int], where: str) -> tuple[np.ndarray, list[DataError]]:
    """Keep the boxes that can be learnt from, cut to the image.

    Args:
        boxes: of one image.
        size: the image's width and height.
        where: the annotation, for the data_errors.

    Returns:
        Label (N, 6) float32, and what was left out or cut.

    Example:
        >>> boxes = [Annotated((1, 2, 30, 9), 4, False), Annotated((5, 5, 5, 9), 0, False)]
        >>> label, data_errors = as_label(boxes, size=(20, 10), where="a.xml")
        >>> label.tolist(), [error.kind for error in data_errors]
        ([[1.0, 2.0, 19.0, 9.0, 4.0, 0.0]], ['box cut at the edge of the image', 'box without area'])
    """
    rows, data_errors = [], []
    for number, box in enumerate(boxes, 1):
        xmin, ymin, xmax, ymax = box.edges
        last_x, last_y = size[0] - 1, size[1] - 1
        left, top, right, bottom = max(xmin, 0.0), max(ymin, 0.0), min(xmax, last_x), min(ymax, last_y)
        if isinstance(box.label, str):
            kind = "unknown class"
        elif not all(map(math.isfinite, box.edges)):
            kind = "unreadable box"
        elif xmax <= xmin or ymax <= ymin:
            kind = "box without area"
        elif right <= left or bottom <= top:
            kind = "box outside the image"
        else:
            rows.append((left, top, right, bottom, box.label, box.difficult))
            beyond = max(left - xmin, top - ymin, xmax - right, ymax - bottom)
            kind = "box cut at the edge of the image" if beyond > _SLIGHTLY else ""
        if kind:
            detail = repr(box.label) if kind == "unknown class" else f"box {number}: {_edges(box)}"
            data_errors.append(DataError(kind, where, detail))
    return np.array(rows, np.float32).reshape(-1, COLUMNS), data_errors


class BoxDataset(mx.gluon.data.Dataset):
    """Images with boxes, behind an index that knows which files can be read.

    Items are ``(image, label)``: the image (H, W, 3) uint8, red first; the label (N, 6) float32 with xmin, ymin, xmax,
    ymax, class and difficult, N may be 0. Edges are 0-based and the last ones inclusive, as in GluonCV.

    Attributes:
        classes: what class 0, 1, ... is called.
        report: what was found while the index was built; a script prints it.
        max_boxes: of one image; at least 1, so that every batch has a row.
    """

    classes: tuple[str, ...]
    report: Report
    max_boxes: int

    def _build(self, name: str, found: Sequence[tuple[Entry | None, list[DataError]]], broken: str, in_memory: bool):
        """Take the index over: an entry for each image that can be used, and what was found with all of them."""
        data_errors = [error for _, some in found for error in some]
        refuse_broken(name, data_errors, broken)
        self._entries = [entry for entry, _ in found if entry is not None]
        num_boxes = sum(len(entry.label) for entry in self._entries)
        self.report = Report(name, len(self._entries), num_boxes, data_errors)
        if not self._entries:
            raise DatasetCorrupt(f"no image is left, so there is nothing to train with. {self.report}")
        if num_boxes == 0 and self.report.counts.get("unknown class"):
            known = ", ".join(self.classes[:10]) + (", ..." if len(self.classes) > 10 else "")
            raise DatasetCorrupt(f"no box is of a known class ({known}); pass classes=. {self.report}")
        self.max_boxes = max([1, *(len(entry.label) for entry in self._entries)])
        self._images = in_threads(self._read, self._entries) if in_memory else None

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        entry = self._entries[index]
        image = self._read(entry) if self._images is None else self._images[index]
        return image, entry.label.copy()

    def with_boxes(self):
        """The same data set without the images that show nothing, which the usual training leaves out."""
        return self._only([index for index, entry in enumerate(self._entries) if len(entry.label)])

    def first(self, number: int):
        """The same data set with its first `number` images only (or all, if there are fewer), for trying things."""
        return self._only(list(range(len(self)))[:number])

    def _only(self, indices):
        if not indices:
            raise DatasetCorrupt(f"no image is left of them. {self.report}")
        part = copy.copy(self)
        part._entries = [self._entries[index] for index in indices]
        part._images = None if self._images is None else [self._images[index] for index in indices]
        return part

    @staticmethod
    def _read(entry):
        image = read_image(entry.path)
        image.setflags(write=False)  # the same whether it is read anew each time or kept
        return image


def _edges(box):
    return "(" + ", ".join(f"{edge:g}" for edge in box.edges) + ")"
