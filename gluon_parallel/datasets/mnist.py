"""MNIST and Fashion-MNIST: four IDX files each, of the same names and shapes."""

from __future__ import annotations

from pathlib import Path

from ..errors import DatasetCorrupt
from .dataset import Dataset, Part, as_part
from .folder import obtain
from .idx import read_idx
from .published import FASHION_MNIST, MNIST

_SIDE = 28
_NUM_CLASSES = 10


def mnist(folder: Path, download: bool) -> Dataset[Part]:
    """Load MNIST's 60,000 + 10,000 handwritten digits from `folder`."""
    return _load("mnist", MNIST, tuple("0123456789"), folder, download)


def fashion_mnist(folder: Path, download: bool) -> Dataset[Part]:
    """Load Fashion-MNIST's 60,000 + 10,000 articles of clothing from `folder`."""
    classes = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
    return _load("fashion_mnist", FASHION_MNIST, tuple(classes.split(",")), folder, download)


def _load(name, files, classes, folder, download) -> Dataset[Part]:
    # All four are there before the first is read: an hour's download does not end in the second file's absence.
    paths = [obtain(name, file, folder, download, also=[file.name[: -len(".gz")]]) for file in files]
    return Dataset(name, _read_part(*paths[:2]), _read_part(*paths[2:]), classes)


def _read_part(images_path: Path, labels_path: Path) -> Part:
    images, labels = read_idx(images_path, num_dims=3), read_idx(labels_path, num_dims=1)
    if images.shape[1:] != (_SIDE, _SIDE):
        height, width = images.shape[1:]
        raise DatasetCorrupt(
            f"{images_path}: images of {height}x{width} pixels, not {_SIDE}x{_SIDE}; this is another data set's file: "
            "replace it by the published one"
        )
    return as_part([images[:, None]], [labels], _NUM_CLASSES, where=f"{images_path} and {labels_path.name}")
