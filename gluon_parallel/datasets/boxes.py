"""Base class of data sets with boxes, and labels from an annotation's boxes without the invalid ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..errors import DatasetCorrupt
from .image_files import DataError
from .indexed import IndexedDataset

COLUMNS = 6  # xmin, ymin, xmax, ymax, class, difficult
_SLIGHTLY = 0.5  # pixels beyond the edge that rounding explains; they are cut without a word


class Annotated(NamedTuple):
    """A box as a file has it."""

    edges: tuple[float, float, float, float]  # xmin, ymin, xmax, ymax: 0-based, the last pixels inclusive
    label: int | str  # the class's number, or what the file says when there is none such
    difficult: bool


def as_label(boxes: Iterable[Annotated], size: tuple[int, int], where: str) -> tuple[np.ndarray, list[DataError]]:
    """The boxes that can be learnt from, cut to their image, as a label (N, 6) float32; and what is wrong in `where`.

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
            edges = ", ".join(f"{edge:g}" for edge in box.edges)
            detail = repr(box.label) if kind == "unknown class" else f"box {number}: ({edges})"
            data_errors.append(DataError(kind, where, detail))
    return np.array(rows, np.float32).reshape(-1, COLUMNS), data_errors


class BoxDataset(IndexedDataset):
    """Images with boxes; see :class:`IndexedDataset`.

    Items are ``(image, label)``: the image (H, W, 3) uint8, red first; the label (N, 6) float32 with xmin, ymin, xmax,
    ymax, class and difficult, N may be 0. Edges are 0-based and the last ones inclusive, as in GluonCV.

    Attributes:
        max_boxes: of one image; at least 1, so that every batch has a row.
    """

    max_boxes: int
    _has_boxes = True

    def _build(self, *arguments, **more):
        super()._build(*arguments, **more)
        if self.report.num_boxes == 0 and self.report.counts.get("unknown class"):
            known = ", ".join(self.classes[:10]) + (", ..." if len(self.classes) > 10 else "")
            raise DatasetCorrupt(f"no box is of a known class ({known}); pass classes=. {self.report}")
        self.max_boxes = max([1, *(len(entry.label) for entry in self._entries)])

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return super().__getitem__(index), self._entries[index].label.copy()

    def with_boxes(self):
        """The same data set without the images that show nothing, which the usual training leaves out."""
        return self._only([index for index, entry in enumerate(self._entries) if len(entry.label)])
