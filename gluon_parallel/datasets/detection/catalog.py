"""Detection data sets by name, for training and for evaluation."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from ...errors import DatasetUnavailable
from .. import coco, scenes, voc
from ..boxes import BoxDataset
from ..folder import unpacked_folder

NAMES = ("scenes", "voc", "coco")
_SCENES = (600, 150)


class Task(NamedTuple):
    """A data set with boxes, in two parts."""

    name: str
    train: BoxDataset  # whose images all have a box
    test: BoxDataset
    classes: tuple[str, ...]


def load(
    name: str,
    root: str | os.PathLike[str] | None = None,
    num_train: int | None = None,
    num_test: int | None = None,
    broken: str = "raise",
    verify: bool = True,
    in_memory: bool = False,
    size: int = 128,
) -> Task:
    """Find a data set, and look at all its files.

    Args:
        name: "scenes" (digits on photographs, written when they are not there yet), "voc" (VOC2007 and VOC2012
            trainval to train with, VOC2007 test) or "coco" (train2017, val2017).
        root: the folder of all data sets, or this one's own; None means what the environment variable
            GLUON_PARALLEL_DATA says, and without that ~/.gluon_parallel/datasets.
        num_train, num_test: only so many images; None: all, and 600 and 150 scenes.
        broken, verify, in_memory: as for :class:`gluon_parallel.datasets.voc.Detection`.
        size: pixels per side of the scenes, when they are written.

    Returns:
        Both parts, and the names of the classes.

    Raises:
        DatasetUnavailable: there is no such data set, or its files are not there: says where they belong.
        DatasetCorrupt: files cannot be read; names them.
    """
    how: dict[str, Any] = {"broken": broken, "verify": verify, "in_memory": in_memory}
    train: BoxDataset
    test: BoxDataset
    if name == "scenes":
        folder = scenes.write(root, num_train or _SCENES[0], num_test or _SCENES[1], size)
        train, test = (voc.Detection(folder, split, scenes.CLASSES, **how) for split in ("train", "test"))
    elif name == "voc":
        folder = unpacked_folder(name, root, ("VOC2007", "VOC2012"))
        train = voc.Detection(folder, [(2007, "trainval"), (2012, "trainval")], **how)
        test = voc.Detection(folder, [(2007, "test")], **how)
    elif name == "coco":
        folder = unpacked_folder(name, root, ("annotations", "train2017", "val2017"))
        train, test = (coco.Detection(folder, split, **how) for split in ("train2017", "val2017"))
    else:
        raise DatasetUnavailable(f"there is no data set {name!r} with boxes; there are {', '.join(map(repr, NAMES))}")
    train, test = train.with_boxes().first(num_train or len(train)), test.first(num_test or len(test))
    return Task(name, train, test, train.classes)
