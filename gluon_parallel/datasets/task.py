"""Task of detection or segmentation: a data set in two parts, found by its name."""

from __future__ import annotations

import os
from typing import Any, Callable, NamedTuple

from ..errors import DatasetUnavailable
from . import scenes
from .folder import unpacked_folder

_SCENES = (600, 150)  # images that are written for training and for testing


class Task(NamedTuple):
    """A data set of images with boxes or masks, in two parts."""

    name: str
    train: Any  # of boxes: its images all have one
    test: Any
    classes: tuple[str, ...]  # of masks: the first is the background


class Source(NamedTuple):
    """Where a data set's files are, and what reads them."""

    folders: tuple[str, ...]  # in the data set's folder
    read: Callable  # function of (folder, **options) that returns the data to train with and to test on


def load_task(
    sources: dict[str, Source],
    kind: str,
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
        sources: by name; "scenes" (digits on photographs) are written when they are not there yet.
        kind: "boxes" or "masks", for the error.
        name: one of them.
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
    if name not in sources:
        raise DatasetUnavailable(
            f"there is no data set {name!r} with {kind}; there are {', '.join(map(repr, sources))}"
        )
    if name == "scenes":
        folder = scenes.write(root, num_train or _SCENES[0], num_test or _SCENES[1], size)
    else:
        folder = unpacked_folder(name, root, sources[name].folders)
    train, test = sources[name].read(folder, broken=broken, verify=verify, in_memory=in_memory)
    return Task(name, train.first(num_train or len(train)), test.first(num_test or len(test)), train.classes)
