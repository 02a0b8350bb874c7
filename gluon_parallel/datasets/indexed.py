"""Data sets of image files with masks or boxes: all files are checked before training, and reported."""

from __future__ import annotations

import contextlib
import copy
import filecmp
import math
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import DatasetCorrupt, warn
from ..mxnet.compat import mx
from ..mxnet.compat.deferred import Deferred

Image = Deferred("PIL.Image")


class DataError(NamedTuple):
    """One error in a file of a data set."""

    kind: str  # in a few words, the same for all of the kind
    where: str  # the file
    detail: str = ""
    broken: bool = False  # the whole sample cannot be used


class BrokenSample(DatasetCorrupt):
    """A sample cannot be used; `error` says why."""

    def __init__(self, kind: str, where: object, detail: str = ""):
        super().__init__(f"{where}: {kind}{detail and f' ({detail})'}; replace it, and make the data set anew")
        self.error = DataError(kind, str(where), detail, broken=True)


@contextlib.contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Read the file in this block of code; BrokenSample: it is not there, or cannot be read."""
    if not path.is_file():
        raise BrokenSample(f"missing {what}", path)
    try:
        with _whole_files_only():
            yield
    # SyntaxError: broken PNG and XML; ValueError: also an encoding that nobody knows.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        words = " ".join(str(error).split()).replace(repr(str(path)), "the file")  # in one line
        raise BrokenSample(f"unreadable {what}", path, words) from error


def read_image(path: Path) -> np.ndarray:
    """Decode a file that Pillow reads, as (H, W, 3) uint8, red first; grey images get three equal channels."""
    with reading(path, "image"), Image.open(path) as file:
        return np.array(file.convert("RGB"))


def read_mask(path: Path) -> np.ndarray:
    """The classes of an image's pixels, (H, W) uint8."""
    with reading(path, "mask"), Image.open(path) as file:
        if file.mode not in ("P", "L"):
            raise ValueError(f"a mask has one byte per pixel, its class; this is an image of mode {file.mode}")
        return np.array(file)


def inspect_image(path: Path) -> tuple[int, int]:
    """The width and height of an image. All of it is decoded, at an eighth of its size where that is possible."""
    with reading(path, "image"), Image.open(path) as file:
        width, height = file.size
        file.draft("RGB", (max(1, width // 8), max(1, height // 8)))
        file.load()
    return width, height


class _Reading:
    lock = threading.Lock()
    now = 0  # how many read at this moment
    told = False  # what Pillow was told before the first of them
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


@contextlib.contextmanager
def _whole_files_only() -> Iterator[None]:
    """Let Pillow refuse files that are cut off: importing GluonCV tells it to fill them with grey, everywhere."""
    from PIL import ImageFile

    with _Reading.lock:
        if _Reading.now == 0:
            _Reading.told, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
        _Reading.now += 1
    try:
        yield
    finally:
        with _Reading.lock:
            _Reading.now -= 1
            if _Reading.now == 0:
                ImageFile.LOAD_TRUNCATED_IMAGES = _Reading.told


def in_threads(function: Callable[..., Any], *arguments: Iterable[Any]) -> list[Any]:
    """``list(map(function, *arguments))``, on as many threads as cores: Pillow decodes without Python's lock."""
    with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0))), "gp-index") as pool:
        return list(pool.map(function, *arguments))


_EXAMPLES = 3  # of each kind of error are named
_COLUMNS = 6  # of a label: xmin, ymin, xmax, ymax, class, difficult
_SLIGHTLY = 0.5  # pixels beyond the edge that rounding explains; they are cut without a word


class Report(NamedTuple):
    """How many samples a data set has, and what was left out or altered; ``print(report)`` says it in words."""

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

    def _build(self, name, inspect, items, stray=(), broken="raise", in_memory=False):
        """Build the index with ``inspect(item)``: an entry and its errors, or BrokenSample. `stray` are of no image."""

        def look(item):
            try:
                return inspect(item)
            except BrokenSample as sample:
                return None, [sample.error]

        if broken not in ("raise", "skip"):
            raise ValueError(f"{name}: broken={broken!r} is none of 'raise', 'skip'")
        found = in_threads(look, items)
        data_errors = [*(error for _, some in found for error in some), *stray]
        unusable = [error for error in data_errors if error.broken]
        if unusable and broken == "raise":
            raise DatasetCorrupt(
                f"{name}: {len(unusable)} images cannot be used; mend or remove them, or leave them out with "
                f"broken='skip':{in_lines(unusable)}"
            )
        self._entries = [entry for entry, _ in found if entry is not None]
        num_boxes = sum(len(entry.label) for entry in self._entries) if isinstance(self, BoxDataset) else None
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


class BoxDataset(IndexedDataset):
    """Images with boxes; see :class:`IndexedDataset`.

    Items are ``(image, label)``: the image (H, W, 3) uint8, red first; the label (N, 6) float32 with xmin, ymin, xmax,
    ymax, class and difficult, N may be 0. Edges are 0-based and the last ones inclusive, as in GluonCV.

    Attributes:
        max_boxes: of one image; at least 1, so that every batch has a row.
    """

    max_boxes: int

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


class Annotated(NamedTuple):
    """A box as a file has it."""

    edges: tuple[float, float, float, float]  # xmin, ymin, xmax, ymax: 0-based, the last pixels inclusive
    label: int | str  # the class's number, or what the file says when there is none such
    difficult: bool


def as_label(boxes: Iterable[Annotated], size: tuple[int, int], where: str) -> tuple[np.ndarray, list[DataError]]:
    """The boxes that can be learnt from, cut to their image, as a label (N, 6) float32; what is wrong in `where`."""
    rows, data_errors = [], []
    for number, box in enumerate(boxes, 1):
        xmin, ymin, xmax, ymax = box.edges
        left, top, right, bottom = max(xmin, 0), max(ymin, 0), min(xmax, size[0] - 1), min(ymax, size[1] - 1)
        if isinstance(box.label, str):
            kind = "unknown class"
        elif not all(map(math.isfinite, box.edges)):
            kind = "unreadable box"
        elif right <= left or bottom <= top:
            kind = "box without area in the image"
        else:
            rows.append((left, top, right, bottom, box.label, box.difficult))
            beyond = max(left - xmin, top - ymin, xmax - right, ymax - bottom)
            kind = "box cut at the edge of the image" if beyond > _SLIGHTLY else ""
        if kind:
            edges = ", ".join(f"{edge:g}" for edge in box.edges)
            detail = repr(box.label) if kind == "unknown class" else f"box {number}: ({edges})"
            data_errors.append(DataError(kind, where, detail))
    return np.array(rows, np.float32).reshape(-1, _COLUMNS), data_errors


def warn_of_shared_images(train: IndexedDataset, test: IndexedDataset) -> None:
    """Warn of images to test with that are trained with, too: the same file, or a copy of it of the same name."""
    by_name = defaultdict(list)
    for entry in train._entries:
        by_name[entry.image.name].append(entry.image)
    images = [entry.image for entry in test._entries]
    shared = [image for image in images if any(_is_same(image, other) for other in by_name[image.name])]
    if shared:
        warn(
            f"{len(shared)} of the {len(images)} images to test with are also trained with, such as {shared[0]}: the "
            "test says too little about new images. Name each image in one of the two lists alone",
            UserWarning,
        )


def _is_same(one: Path, other: Path) -> bool:
    return one == other or (one.stat().st_size == other.stat().st_size and filecmp.cmp(one, other, shallow=False))


def those_there(names: Iterable[str]) -> str:
    """For an error: what there is in the place of what is missing."""
    there = sorted(names)
    return f"there are {', '.join(there[:9])}" if there else "nor any other; is this the right folder?"


def check_size(stated: Iterable[Any], size: tuple[int, int], where: object, kind: str) -> None:
    """Refuse a sample whose annotation or mask states another width and height than its image has."""
    width, height = map(number, stated)
    if np.isfinite(width * height) and width and height and (width, height) != size:  # some write 0, or nothing
        raise BrokenSample(kind, where, f"{width:g}x{height:g}, but the image is {size[0]}x{size[1]}")


def number(value: Any) -> float:
    """NaN for what is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
