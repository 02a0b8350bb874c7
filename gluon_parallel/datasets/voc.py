"""Pascal VOC: images with boxes, and images with masks, read from a folder in the devkit's layout.

::

    VOC2007/Annotations/000005.xml        boxes, in pixels counted from 1
            ImageSets/Main/train.txt      names of images, one per line; ImageSets/Segmentation/ for masks
            JPEGImages/000005.jpg
            SegmentationClass/000005.png  0 background, 1 the first class, ..., 255 void

All files are looked at when a data set is made: one that cannot be read stops the program there, or is left out and
counted, and training is never stopped by it.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Union
from xml.etree import ElementTree

import numpy as np

from ..compat import mx
from ..errors import DatasetCorrupt, DatasetUnavailable
from .boxes import Annotated, BoxDataset, Entry, as_label
from .data_errors import DataError, Report, refuse_broken
from .image_files import in_threads, inspect_image, read_image, whole_files_only

CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
VOID = -1  # in a mask that is read; 255 in the file
_EDGES = ("xmin", "ymin", "xmax", "ymax")

# "train", where the root itself has the folder ImageSets, or (2007, "trainval") and so on below a devkit.
Splits = Union[str, Sequence[tuple[Union[int, str], str]]]


class Detection(BoxDataset):
    """Pascal VOC's images with boxes; see :class:`BoxDataset` for what an item is.

    Args:
        root: the devkit, which has the folders VOC2007 and so on; or one such folder.
        splits: "trainval" if `root` is one such folder; else pairs as GluonCV has them,
            ``[(2007, "trainval"), (2012, "trainval")]``, or with a folder's name for the year.
        classes: their names, in the order of their numbers; case does not matter.
        broken: "raise" an error if an image or its annotation cannot be read, or "skip" it and count it.
        verify: decode every image once now; without it only its header is read, and one that is cut off is noticed
            when it is needed.
        in_memory: keep all images decoded.

    Raises:
        DatasetUnavailable: there is no such folder or list.
        DatasetCorrupt: files cannot be read (names them), or nothing can be used.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        splits: Splits,
        classes: Sequence[str] = CLASSES,
        broken: str = "raise",
        verify: bool = True,
        in_memory: bool = False,
    ):
        self.classes = tuple(classes)
        items = _items(root, splits, "Main")
        numbers = {name.lower(): number for number, name in enumerate(self.classes)}
        look = functools.partial(_inspect_boxes, numbers=numbers, whole=verify)
        self._build(_title(root, splits), in_threads(look, items), broken, in_memory)


class Segmentation(mx.gluon.data.Dataset):
    """Pascal VOC's images with masks.

    Items are ``(image, mask)``: the image (H, W, 3) uint8, red first; the mask (H, W) int32 with 0 for the background,
    1 for the first class, ..., and -1 for what does not count: the soft borders, and classes that are unknown.

    Args:
        root, splits, broken, in_memory: as for :class:`Detection`.
        classes: their names without the background.
        verify: decode every image and mask once now; without it only headers are read.

    Attributes:
        classes: "background" and the others.
        report: what was found while the index was built; a script prints it.

    Raises:
        DatasetUnavailable: there is no such folder or list.
        DatasetCorrupt: files cannot be read (names them), or nothing can be used.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        splits: Splits,
        classes: Sequence[str] = CLASSES,
        broken: str = "raise",
        verify: bool = True,
        in_memory: bool = False,
    ):
        self.classes = ("background", *classes)
        name = _title(root, splits)
        items = _items(root, splits, "Segmentation")
        look = functools.partial(_inspect_mask, num_classes=len(self.classes), whole=verify)
        found = in_threads(look, items)
        data_errors = [error for _, some in found for error in some]
        refuse_broken(name, data_errors, broken)
        self._entries = [paths for paths, _ in found if paths is not None]
        self.report = Report(name, len(self._entries), None, data_errors)
        if not self._entries:
            raise DatasetCorrupt(f"no image is left, so there is nothing to train with. {self.report}")
        self._kept = in_threads(self._read, self._entries) if in_memory else None

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._read(self._entries[index]) if self._kept is None else self._kept[index]

    def first(self, number: int):
        """The same data set with its first `number` images only (or all, if there are fewer), for trying things."""
        part = copy.copy(self)
        part._entries = self._entries[:number]
        part._kept = None if self._kept is None else self._kept[:number]
        return part

    def _read(self, paths):
        image, mask = read_image(paths[0]), _read_mask(paths[1]).astype(np.int32)
        mask[mask >= len(self.classes)] = VOID
        image.setflags(write=False)
        mask.setflags(write=False)
        return image, mask


def _title(root, splits):
    parts = splits if isinstance(splits, str) else ", ".join(f"{year} {split}" for year, split in splits)
    return f"{Path(root)} ({parts})"


def _items(root, splits, kind):
    """(folder, name) of each image that the lists name."""
    found = []
    for year, split in [("", splits)] if isinstance(splits, str) else splits:
        folder = Path(root).expanduser() / (f"VOC{year}" if isinstance(year, int) else year)
        index = folder / "ImageSets" / kind / f"{split}.txt"
        if not index.is_file():
            there = sorted(path.stem for path in index.parent.glob("*.txt"))
            instead = f"there are {', '.join(there[:9])}" if there else "nor any other list; is this the right folder?"
            raise DatasetUnavailable(f"{index}: there is no such list of images; {instead}")
        lines = index.read_text("utf-8", errors="replace").splitlines()
        names = [line.split()[0] for line in lines if line.strip()]  # lists of one class have a second column
        if not names:
            raise DatasetCorrupt(f"{index}: the list names no image; replace it")
        found += [(folder, name) for name in names]
    return found


def _inspect_boxes(item, numbers, whole):
    """An entry for the image, or None, and what was found."""
    folder, name = item
    image, annotation = folder / "JPEGImages" / f"{name}.jpg", folder / "Annotations" / f"{name}.xml"
    size = inspect_image(image, whole)
    if isinstance(size, DataError):
        return None, [size]
    if not annotation.is_file():
        return None, [DataError("missing annotation", str(annotation), broken=True)]
    try:
        root = ElementTree.parse(annotation).getroot()
    except (ElementTree.ParseError, ValueError, OSError) as error:  # ValueError: an encoding that nobody knows
        return None, [DataError("unreadable annotation", str(annotation), str(error), broken=True)]
    stated = tuple(_number(root.findtext(f"size/{side}")) for side in ("width", "height"))
    if all(stated) and stated != size and np.isfinite(stated).all():  # some programs write 0, or nothing
        detail = f"{stated[0]:g}x{stated[1]:g}, but the image is {size[0]}x{size[1]}"
        return None, [DataError("annotation for another size", str(annotation), detail, broken=True)]
    label, data_errors = as_label(map(functools.partial(_annotated, numbers=numbers), root.iter("object")), size,
                               str(annotation))  # fmt: skip
    return Entry(image, label), data_errors


def _annotated(item, numbers):
    name = (item.findtext("name") or "").strip()
    xmin, ymin, xmax, ymax = (_number(item.findtext(f"bndbox/{edge}")) - 1 for edge in _EDGES)
    difficult = _number(item.findtext("difficult") or "0") == 1
    return Annotated((xmin, ymin, xmax, ymax), numbers.get(name.lower(), name), difficult)


def _number(text):
    """NaN for what is no number."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return float("nan")


def _inspect_mask(item, num_classes, whole):
    """The paths of image and mask, or None, and what was found."""
    folder, name = item
    image, mask = folder / "JPEGImages" / f"{name}.jpg", folder / "SegmentationClass" / f"{name}.png"
    size = inspect_image(image, whole)
    if isinstance(size, DataError):
        return None, [size]
    if not mask.is_file():
        return None, [DataError("missing mask", str(mask), broken=True)]
    try:
        values = _read_mask(mask, whole)
    except DatasetCorrupt as error:
        return None, [DataError("unreadable mask", str(mask), str(error), broken=True)]
    if values.shape[::-1] != size:
        detail = f"{values.shape[1]}x{values.shape[0]}, but the image is {size[0]}x{size[1]}"
        return None, [DataError("mask of another size", str(mask), detail, broken=True)]
    unknown = np.unique(values[(values >= num_classes) & (values != 255)]).tolist()
    if unknown:
        return (image, mask), [DataError("unknown class in the mask, counted as void", str(mask), f"values {unknown}")]
    return (image, mask), []


def _read_mask(path, whole=True):
    """(H, W) uint8, of which the values count if it was read whole."""
    from PIL import Image

    try:
        with whole_files_only(), Image.open(path) as file:
            if file.mode not in ("P", "L"):
                raise DatasetCorrupt(f"a mask has one byte per pixel, its class; this is an image of mode {file.mode}")
            return np.array(file) if whole else np.broadcast_to(np.uint8(0), file.size[::-1])
    except (OSError, SyntaxError) as error:
        raise DatasetCorrupt(f"the mask cannot be read ({error})") from error
