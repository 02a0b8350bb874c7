"""COCO: images with boxes, read from a folder in the published layout.

::

    annotations/instances_val2017.json    images, categories and boxes
    val2017/000000000139.jpg              or below images/

The file's category ids have gaps; here the classes are numbered from 0 without any. COCO's boxes are (x, y, width,
height); here they are (xmin, ymin, xmax, ymax), of which the maxima are inclusive, as in GluonCV.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DatasetCorrupt, DatasetUnavailable
from .indexed import Annotated, BoxDataset, DataError, Entry, as_label, check_size, inspect_image, number, those_there

_PREFIX = "instances_"
_SECTIONS = {"images": ("id", "file_name"), "annotations": (), "categories": ("id", "name")}  # and their keys


class Detection(BoxDataset):
    """COCO's images with boxes; see :class:`BoxDataset` for what an item is. "difficult" is 1 for boxes of crowds.

    All images are there, in the order of their ids, also those without boxes, which evaluation needs; training
    takes ``Detection(...).with_boxes()``.

    Args:
        root: the folder with `annotations`.
        split: "val2017", or another for which there is a file ``instances_<split>.json``.
        classes: the names of the categories to take, in the order of their numbers; None: all of the file, in the
            order of their ids.
        options: broken and in_memory, see :class:`IndexedDataset`.

    Attributes:
        annotations: path of the file.
        category_ids: the file's id of each class, for :class:`gluon_parallel.metrics.COCOMeanAP`.

    Raises:
        DatasetUnavailable: there is no such file.
        DatasetCorrupt: a file cannot be read (names it), a class is not in the file, or nothing can be used.
    """

    def __init__(self, root: str | os.PathLike[str], split: str, classes: Sequence[str] | None = None, **options: Any):
        split = split.removeprefix(_PREFIX)
        folder = Path(root).expanduser()
        self.annotations = folder / "annotations" / f"{_PREFIX}{split}.json"
        content = _load(self.annotations)
        self.classes, self.category_ids = _categories(content, classes, self.annotations)
        boxes, orphans = _boxes_by_image(content, self.category_ids, self.annotations)
        images = sorted(content["images"], key=lambda image: image["id"])
        places = [folder / split, folder / "images" / split, folder / "images", folder]

        def inspect(image):
            paths = [place / image["file_name"] for place in places]
            path = next(filter(Path.is_file, paths), paths[0])  # the first that exists, else the usual one
            size, where = inspect_image(path), f"{self.annotations.name}, image {image['id']}"
            check_size((image.get("width"), image.get("height")), size, where, "annotation for another size")
            label, data_errors = as_label(boxes.get(image["id"], ()), size, where)
            return Entry(path, label, image["id"]), data_errors

        self._build(f"{folder} ({split})", inspect, images, orphans, **options)

    @property
    def image_ids(self) -> list[Any]:
        """The file's id of each item."""
        return [entry.image_id for entry in self._entries]


def own_parts(root: str | os.PathLike[str]) -> tuple[Path, str, str] | None:
    """A folder with annotations of somebody's own: itself, the split to train with, and the one to test with.

    They are those of the published data set; else the only one that begins with "train", and the only one that begins
    with "val", or with "test". None: the folder has no annotations.

    Raises:
        DatasetUnavailable: there are annotations, and it is not clear which these are.
    """
    root = Path(root).expanduser()
    if not (root / "annotations").is_dir():
        return None
    there = [path.stem[len(_PREFIX) :] for path in root.glob(f"annotations/{_PREFIX}*.json")]
    if {"train2017", "val2017"} <= {*there}:
        return root, "train2017", "val2017"
    train, val, test = ([name for name in there if name.startswith(start)] for start in ("train", "val", "test"))
    if len(train) != 1 or len(val or test) != 1:
        raise DatasetUnavailable(
            f"{root / 'annotations'}: expected one file {_PREFIX}train*.json, and one {_PREFIX}val*.json to test with; "
            f"{those_there(there)}"
        )
    return root, train[0], (val or test)[0]


def _load(path):
    if not path.is_file():
        instead = those_there(file.stem[len(_PREFIX) :] for file in path.parent.glob(f"{_PREFIX}*.json"))
        raise DatasetUnavailable(f"{path}: there are no such annotations; {instead}")
    try:
        content = json.loads(path.read_text("utf-8"))
        for part, keys in _SECTIONS.items():
            if not all(key in item for item in content[part] for key in keys):
                raise KeyError(f"{part} without {' or '.join(keys)}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DatasetCorrupt(
            f"{path}: not a file of COCO's annotations, which has {', '.join(_SECTIONS)} ({type(error).__name__}: "
            f"{error}); replace it by the published one"
        ) from error
    if not content["images"]:
        raise DatasetCorrupt(f"{path}: it names no image; replace it")
    return content


def _categories(content, classes, path):
    """Names of the classes and their COCO category ids, in the order of the classes."""
    known = {category["name"]: category["id"] for category in sorted(content["categories"], key=lambda one: one["id"])}
    names = tuple(known if classes is None else classes)
    missing = [name for name in names if name not in known]
    if missing or not names:
        raise DatasetCorrupt(
            f"{path}: {', '.join(missing) or 'any class'} is not among its categories ({', '.join(list(known)[:10])}"
            f"{', ...' if len(known) > 10 else ''}); pass classes= of these"
        )
    return names, [known[name] for name in names]


def _boxes_by_image(content, category_ids, path):
    """Boxes by image id, and errors for annotations of unknown images."""
    class_of = {category: number for number, category in enumerate(category_ids)}
    not_wanted = {category["id"] for category in content["categories"]} - set(class_of)
    images = {image["id"] for image in content["images"]}
    boxes, orphans = defaultdict(list), []
    for box in content["annotations"]:
        category = box.get("category_id")
        if box.get("image_id") not in images:
            orphans.append(DataError("box of an unknown image", str(path), f"annotation {box.get('id')}"))
        elif category not in not_wanted:
            bbox = box.get("bbox")
            x, y, width, height = map(number, bbox if isinstance(bbox, list) and len(bbox) == 4 else [None] * 4)
            label = class_of.get(category, f"category {category}")
            edges = (x, y, x + width - 1, y + height - 1)
            boxes[box["image_id"]].append(Annotated(edges, label, bool(box.get("iscrowd"))))
    return boxes, orphans
