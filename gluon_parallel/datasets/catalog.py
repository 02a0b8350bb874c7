"""Data sets by name: those of images with labels are entered here, others in `detection`, `segmentation` and `text`."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable, NamedTuple

from . import mnist, scenes
from .cifar import cifar10
from .dataset import Dataset, Part, find
from .digits import handwritten_digits
from .folder import data_folder, unpacked_folder
from .indexed import BoxDataset
from .voc import Folder

_LOAD = {
    "digits": lambda folder, download: handwritten_digits(),
    "fashion_mnist": functools.partial(mnist.load, "fashion_mnist"),
    "mnist": functools.partial(mnist.load, "mnist"),
    "cifar10": cifar10,
}
NAMES = tuple(_LOAD)
_SCENES = (600, 150)  # images that are written for training and for testing


def load(name: str, root: str | os.PathLike[str] | None = None, download: bool = True) -> Dataset[Part]:
    """Load a data set into memory.

    Args:
        name: "digits" (1,797 images of 28x28, embedded), "fashion_mnist" or "mnist" (70,000 of 28x28), "cifar10"
            (60,000 of 32x32 in colour).
        root: the folder with the files, ``<root>/<name>/`` or `root` itself if it is called `name`; None means what
            the environment variable GLUON_PARALLEL_DATA says, and without that ~/.gluon_parallel/datasets.
        download: fetch a file that is not there.

    Returns:
        Training and test images, (N, C, H, W) float32 in [0, 1], with their int32 labels.

    Raises:
        DatasetUnavailable: there is no such data set, or a file is neither in the folder nor to be downloaded.
        DatasetCorrupt: a file is damaged or another one.

    Example:
        >>> data = load("digits")
        >>> data.train.images.shape, data.test.labels.shape, data.num_classes
        ((1438, 1, 28, 28), (359,), 10)
    """
    return find(name, _LOAD)(data_folder(name, root), download)


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
