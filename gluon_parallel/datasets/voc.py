"""Pascal VOC: images with boxes, and images with masks, read from a folder in the devkit's layout.

::

    VOC2007/Annotations/000005.xml        boxes, in pixels counted from 1
            ImageSets/Main/train.txt      names of images, one per line; ImageSets/Segmentation/ for masks
            JPEGImages/000005.jpg         or .jpeg, .png
            SegmentationClass/000005.png  0 background, 1 the first class, ..., 255 void
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union
from xml.etree import ElementTree

import numpy as np

from ..errors import DatasetCorrupt, DatasetUnavailable
from .indexed import (
    Annotated,
    BoxDataset,
    DataError,
    Entry,
    IndexedDataset,
    as_label,
    check_size,
    inspect_image,
    number,
    read_mask,
    reading,
    those_there,
)  # fmt: skip

CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
VOID = -1  # in a mask that is read; 255 in the file

Folder = Union[str, os.PathLike]
# "train", where the root itself has the folder ImageSets, or (2007, "trainval") and so on below a devkit.
Splits = Union[str, Sequence[tuple[Union[int, str], str]]]


class Detection(BoxDataset):
    """Pascal VOC's images with boxes; see :class:`BoxDataset` for what an item is.

    Args:
        root: the devkit, which has the folders VOC2007 and so on; or one such folder.
        splits: "trainval" if `root` is one such folder; else pairs as GluonCV has them,
            ``[(2007, "trainval"), (2012, "trainval")]``, or with a folder's name for the year.
        classes: their names, in the order of their numbers; case does not matter.
        options: broken and in_memory, see :class:`IndexedDataset`.

    Raises:
        DatasetUnavailable: there is no such folder or list.
        DatasetCorrupt: files cannot be read (names them), or nothing can be used.
    """

    def __init__(self, root: Folder, splits: Splits, classes: Sequence[str] = CLASSES, **options: Any):
        self.classes = tuple(classes)
        self._numbers = {name.lower(): number for number, name in enumerate(self.classes)}
        self._build(_title(root, splits), self._inspect, _items(root, splits, "Main"), **options)

    def _inspect(self, item):
        folder, name = item
        image, annotation = _image(folder, name), folder / "Annotations" / f"{name}.xml"
        size = inspect_image(image)
        with reading(annotation, "annotation"):
            root = ElementTree.parse(annotation).getroot()
        stated = [root.findtext(f"size/{side}") for side in ("width", "height")]
        check_size(stated, size, annotation, "annotation for another size")
        label, data_errors = as_label(map(self._annotated, root.iter("object")), size, str(annotation))
        return Entry(image, label), data_errors

    def _annotated(self, item):
        name = (item.findtext("name") or "").strip()
        xmin, ymin, xmax, ymax = (
            number(item.findtext(f"bndbox/{edge}")) - 1 for edge in ("xmin", "ymin", "xmax", "ymax")
        )
        difficult = number(item.findtext("difficult") or "0") == 1
        return Annotated((xmin, ymin, xmax, ymax), self._numbers.get(name.lower(), name), difficult)


class Segmentation(IndexedDataset):
    """Pascal VOC's images with masks; see :class:`IndexedDataset`.

    Items are ``(image, mask)``: the image (H, W, 3) uint8, red first; the mask (H, W) int32 with 0 for the background,
    1 for the first class, ..., and -1 for what does not count: the soft borders, and classes that are unknown.

    Args:
        root, splits, options: as for :class:`Detection`, and so are the errors.
        classes: their names without the background, which the attribute `classes` begins with.
    """

    def __init__(self, root: Folder, splits: Splits, classes: Sequence[str] = CLASSES, **options: Any):
        self.classes = ("background", *classes)
        items = _items(root, splits, "Segmentation")
        self._build(_title(root, splits), self._inspect, items, **options)

    def _inspect(self, item):
        folder, name = item
        image, mask = _image(folder, name), folder / "SegmentationClass" / f"{name}.png"
        size = inspect_image(image)
        values = read_mask(mask)
        check_size(values.shape[::-1], size, mask, "mask of another size")
        unknown = np.unique(values[(values >= len(self.classes)) & (values != 255)]).tolist()
        what = "unknown class in the mask, counted as void"
        return Entry(image, mask), [DataError(what, str(mask), f"values {unknown}")] if unknown else []

    def _read(self, entry):
        image, mask = super()._read(entry), read_mask(entry.label).astype(np.int32)
        mask[mask >= len(self.classes)] = VOID
        mask.setflags(write=False)
        return image, mask


def own_parts(root: Folder) -> tuple[Path, Splits, Splits] | None:
    """A folder with boxes of somebody's own: itself, the splits to train with, and those to test with.

    It has the folder Annotations, or folders of any name that have it. Its lists are train and val, train and test, or
    trainval and test. None: it has no annotations.

    Raises:
        DatasetUnavailable: there are annotations, and no such two lists.
    """
    root = Path(root).expanduser()
    folders = [one for one in (root, *sorted(root.glob("*"))) if (one / "Annotations").is_dir()]
    if not folders:
        return None
    lists = {folder: {path.stem for path in folder.glob("ImageSets/Main/*.txt")} for folder in folders}
    there = set().union(*lists.values())
    for train, test in (("trainval", "test"), ("train", "val"), ("train", "test")):
        if {train, test} <= there:
            if folders[0] == root:
                return root, train, test
            named = [[(one.name, split) for one in folders if split in lists[one]] for split in (train, test)]
            return root, named[0], named[1]
    raise DatasetUnavailable(
        f"{folders[0]}: which images are trained with, and which are tested with? {Path('ImageSets', 'Main')} needs "
        f"train.txt and val.txt, or trainval.txt and test.txt, with one image's name per line; {those_there(there)}"
    )


def _image(folder, name):
    """The file of an image; the published ones are .jpg."""
    paths = [folder / "JPEGImages" / f"{name}{ending}" for ending in (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")]
    return next(filter(Path.is_file, paths), paths[0])


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
            instead = those_there(path.stem for path in index.parent.glob("*.txt"))
            raise DatasetUnavailable(f"{index}: there is no such list of images; {instead}")
        lines = index.read_text("utf-8", errors="replace").splitlines()
        names = [line.split()[0] for line in lines if line.strip()]  # lists of one class have a second column
        if not names:
            raise DatasetCorrupt(f"{index}: the list names no image; replace it")
        found += [(folder, name) for name in names]
    return found
