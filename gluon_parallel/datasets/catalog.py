"""Data sets for image classification by name; a new one is entered here."""

from __future__ import annotations

import functools
import os

from . import mnist
from .cifar import cifar10
from .dataset import Dataset, Part, find
from .digits import handwritten_digits
from .folder import data_folder

_LOAD = {
    "digits": lambda folder, download: handwritten_digits(),
    "fashion_mnist": functools.partial(mnist.load, "fashion_mnist"),
    "mnist": functools.partial(mnist.load, "mnist"),
    "cifar10": cifar10,
}
NAMES = tuple(_LOAD)


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
