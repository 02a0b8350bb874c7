"""Data set in two parts, each of images or texts with their labels, and data sets by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ..errors import DatasetCorrupt, DatasetUnavailable


class Part(NamedTuple):
    """Images with their labels; ``batches(*part, batch_size)`` takes it as it is."""

    images: np.ndarray  # (N, C, H, W) float32 in [0, 1]
    labels: np.ndarray  # (N,) int32 in [0, num_classes)


class Texts(NamedTuple):
    """Texts with their labels."""

    texts: tuple[str, ...]
    labels: np.ndarray  # (N,) int32 in [0, num_classes)


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Dataset(Generic[T]):
    """A data set of images or texts with labels, or of images with boxes or masks."""

    name: str
    train: T  # of boxes: its images all have one
    test: T
    classes: tuple[str, ...]  # what label 0, label 1, ... mean; of masks, the first is the background

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)


def find(name: str, known: Mapping[str, Any], kind: str = "") -> Any:
    """What `known` has under that name, or DatasetUnavailable, which lists the names there are."""
    if name not in known:
        raise DatasetUnavailable(f"there is no data set {name!r}{kind}; there are {', '.join(map(repr, known))}")
    return known[name]


def as_part(files: Sequence[tuple[np.ndarray, np.ndarray]], num_classes: int, where: str) -> Part:
    """Join the bytes of files into one part; DatasetCorrupt: their numbers differ or are 0, or a label is no class.

    Each file has (n, C, H, W) uint8 images (255 becomes 1.0) and (n,) labels.

    Example:
        >>> part = as_part([(np.full((2, 1, 1, 1), 255, np.uint8), np.array([3, 9]))], num_classes=10, where="here")
        >>> part.images.ravel().tolist(), part.labels.tolist()
        ([1.0, 1.0], [3, 9])
    """
    num_images, labels = sum(len(images) for images, _ in files), np.concatenate([labels for _, labels in files])
    if num_images != len(labels):
        raise DatasetCorrupt(
            f"{where}: {num_images} images but {len(labels)} labels; these files do not belong together: "
            "take both from the same download"
        )
    if num_images == 0:
        raise DatasetCorrupt(f"{where}: no images at all; replace the file by the published one")
    wrong = np.flatnonzero(labels >= num_classes)
    if len(wrong):
        raise DatasetCorrupt(
            f"{where}: label {labels[wrong[0]]} of image {wrong[0]} is none of the {num_classes} classes "
            f"0..{num_classes - 1}; replace the file by the published one"
        )
    # Straight into the final array, file by file: joining the bytes first would hold the whole set twice.
    scaled, start = np.empty((num_images, *files[0][0].shape[1:]), np.float32), 0
    for images, _ in files:
        np.divide(images, np.float32(255), out=scaled[start : start + len(images)])
        start += len(images)
    return Part(scaled, labels.astype(np.int32))
