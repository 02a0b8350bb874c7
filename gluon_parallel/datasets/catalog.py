"""Data sets of images with boxes or masks, by name: `detection` and `segmentation` enter theirs here."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

from . import scenes
from .dataset import Dataset, find, unpacked_folder
from .indexed import BoxDataset
from .voc import Folder

_SCENES = (600, 150)  # images that are written for training and for testing


class Source(NamedTuple):
    """Where a data set's files are, and what reads them."""

    folders: tuple[str, ...]  # in the data set's folder
    read: Callable  # function of (folder, split, **options) that returns the images of a part
    train: Any  # the splits
    test: Any


class Task(NamedTuple):
    """The data sets whose images have boxes, or masks."""

    targets: str  # what the images have
    sources: dict[str, Source]  # by the names of the data sets

    def load(
        self, name: str, root: Folder | None = None, num_train: int | None = None, num_test: int | None = None,
        size: int = 128, **options: Any,
    ) -> Dataset[Any]:  # fmt: skip
        """Find a data set, and look at all its files.

        Args:
            name: one of `NAMES`; "scenes" (digits on photographs) are written when they are not there yet.
            root: the folder of all data sets, or this one's own, as for :func:`gluon_parallel.datasets.load`.
            num_train, num_test: only so many images; None: all, and 600 and 150 scenes.
            size: pixels per side of the scenes, when they are written.
            options: ``broken="skip"`` leaves images out whose files cannot be read, and counts them; ``in_memory=True``
                keeps all images decoded.

        Returns:
            Both parts, and the names of the classes; of boxes, only those images to train with that have some.

        Raises:
            DatasetUnavailable: there is no such data set, or its files are not there: says where they belong.
            DatasetCorrupt: files cannot be read; names them.
        """
        source = find(name, self.sources, f" with {self.targets}")
        if name == "scenes":
            folder = scenes.write(root, num_train or _SCENES[0], num_test or _SCENES[1], size)
        else:
            folder = unpacked_folder(name, root, source.folders)
        train, test = (source.read(folder, split, **options) for split in source[2:])
        if isinstance(train, BoxDataset):
            train = train.with_boxes()
        return Dataset(name, train.first(num_train or len(train)), test.first(num_test or len(test)), train.classes)
