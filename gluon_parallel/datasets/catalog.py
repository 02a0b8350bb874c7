"""Data sets of images with boxes or masks, by name: `detection` and `segmentation` enter theirs here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional

from . import scenes
from .dataset import Dataset, find, unpacked_folder
from .indexed import BoxDataset, warn_of_shared_images
from .voc import Folder

_SCENES = (600, 150)  # images that are written for training and for testing


class Source(NamedTuple):
    """Where a data set's files are, and what reads them."""

    folders: tuple[str, ...]  # in the data set's folder
    read: Callable  # function of (folder, split, **options) that returns the images of a part
    train: Any  # the splits
    test: Any
    own_parts: Callable[[Folder], Optional[tuple[Any, Any, Any]]] = lambda root: None  # (folder, train, test) of others
    own: str = ""  # what a folder of others has, in words


class Task(NamedTuple):
    """The data sets whose images have boxes, or masks."""

    targets: str  # what the images have
    sources: dict[str, Source]  # by the names of the data sets

    def load(
        self, name: str, root: Folder | None = None, num_train: int | None = None, num_test: int | None = None,
        size: int = 128, classes: Sequence[str] | None = None, **options: Any,
    ) -> Dataset[Any]:  # fmt: skip
        """Find a data set, and look at all its files.

        Args:
            name: one of `NAMES`; "scenes" (digits on photographs) are written when they are not there yet.
            root: the folder of all data sets, or this one's own, as for :func:`gluon_parallel.datasets.load`.
            num_train, num_test: only so many images; None: all, and 600 and 150 scenes.
            size: pixels per side of the scenes, when they are written.
            classes: their names, in the order of their numbers, of boxes of your own; `root` is a folder in the layout
                of the data set `name`, see :class:`.voc.Detection` and :class:`.coco.Detection`. None: those of the
                data set, or of COCO's file.
            options: ``broken="skip"`` leaves images out whose files cannot be read, and counts them; ``in_memory=True``
                keeps all images decoded.

        Returns:
            Both parts, and the names of the classes; of boxes, only those images to train with that have some.

        Raises:
            DatasetUnavailable: there is no such data set, or its files are not there: says where they belong.
            ValueError: `classes` of a data set that has no others.
            DatasetCorrupt: files cannot be read; names them.
        """
        source = find(name, self.sources, f" with {self.targets}")
        if classes is not None and name == "scenes":
            raise ValueError(
                f"classes={tuple(classes)}: scenes have the digits; boxes of your own are of 'voc' or 'coco'"
            )
        if name == "scenes":
            folder = scenes.write(root, num_train or _SCENES[0], num_test or _SCENES[1], size)
            to_train, to_test = source.train, source.test
        else:
            own = source.own_parts(root) if root is not None else None
            published = source.train, source.test
            folder, to_train, to_test = own or (unpacked_folder(name, root, source.folders, source.own), *published)
        if classes is not None:
            options["classes"] = tuple(classes)
        train = source.read(folder, to_train, **options)
        if isinstance(train, BoxDataset):
            options["classes"] = train.classes  # of COCO's files, each has its own
            train = train.with_boxes()
        test = source.read(folder, to_test, **options)
        warn_of_shared_images(train, test)
        return Dataset(name, train.first(num_train or len(train)), test.first(num_test or len(test)), train.classes)
