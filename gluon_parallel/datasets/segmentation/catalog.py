"""Segmentation data sets by name, for training and for evaluation."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from ...errors import DatasetUnavailable
from .. import scenes, voc
from ..folder import unpacked_folder

NAMES = ("scenes", "voc")
_SCENES = (600, 150)


class Task(NamedTuple):
    """A data set with masks, in two parts."""

    name: str
    train: voc.Segmentation
    test: voc.Segmentation
    classes: tuple[str, ...]  # the first is the background


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
        name: "scenes" (digits on photographs, written when they are not there yet) or "voc" (VOC2012 train and val).
        root, num_train, num_test, broken, verify, in_memory, size: as for
            :func:`gluon_parallel.datasets.detection.load`.

    Returns:
        Both parts, and the names of the classes.

    Raises:
        DatasetUnavailable: there is no such data set, or its files are not there: says where they belong.
        DatasetCorrupt: files cannot be read; names them.
    """
    how: dict[str, Any] = {"broken": broken, "verify": verify, "in_memory": in_memory}
    if name == "scenes":
        folder = scenes.write(root, num_train or _SCENES[0], num_test or _SCENES[1], size)
        train, test = (voc.Segmentation(folder, split, scenes.CLASSES, **how) for split in ("train", "test"))
    elif name == "voc":
        folder = unpacked_folder(name, root, ("VOC2012",))
        train, test = (voc.Segmentation(folder, [(2012, split)], **how) for split in ("train", "val"))
    else:
        raise DatasetUnavailable(f"there is no data set {name!r} with masks; there are {', '.join(map(repr, NAMES))}")
    return Task(name, train.first(num_train or len(train)), test.first(num_test or len(test)), train.classes)
