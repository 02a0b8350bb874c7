"""Detection data: data sets with boxes by name (a new one is entered here), random transforms, padding.

The names are "scenes" (digits on photographs), "voc" (VOC2007 and VOC2012 trainval to train with, VOC2007 test) and
"coco" (train2017, val2017). Boxes of your own are in a folder with the layout of one of the last two: see
:func:`.voc.own_parts` and :func:`.coco.own_parts`.

A transform is a function (image, label, random). Edges are 0-based and the last ones inclusive: a box covers
``xmax - xmin + 1`` pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from . import coco, scenes, voc
from .catalog import Source, Task
from .pictures import resized
from .samples import Transform, padded
from .samples import compose as compose

_TASK = Task(
    "boxes",
    {
        "scenes": Source((), functools.partial(voc.Detection, classes=scenes.CLASSES), "train", "test"),
        "voc": Source(
            ("VOC2007", "VOC2012"),
            voc.Detection,
            [(2007, "trainval"), (2012, "trainval")],
            [(2007, "test")],
            voc.own_parts,
            "the folders Annotations, ImageSets/Main and JPEGImages",
        ),  # fmt: skip
        "coco": Source(
            ("annotations", "train2017", "val2017"),
            coco.Detection,
            "train2017",
            "val2017",
            coco.own_parts,
            "the folder annotations, with instances_train*.json and instances_val*.json",
        ),
    },
)
NAMES, load = tuple(_TASK.sources), _TASK.load


def flip(image: np.ndarray, label: np.ndarray, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Mirror left and right, every other time. Not for digits and letters.

    Example:
        >>> image, label = np.arange(12, dtype=np.uint8).reshape(1, 4, 3), np.array([[0, 0, 1, 0, 5, 0]], np.float32)
        >>> flipped, moved = flip(image, label, np.random.RandomState(1))  # whose first number is 0.417
        >>> flipped[0, 0].tolist(), moved.tolist()
        ([9, 10, 11], [[2.0, 0.0, 3.0, 0.0, 5.0, 0.0]])
    """
    if random.rand() >= 0.5:
        return image, label
    label = label.copy()
    label[:, [0, 2]] = image.shape[1] - 1 - label[:, [2, 0]]
    return image[:, ::-1], label


def crop(least: float = 0.6, keep: float = 0.6) -> Transform:
    """Make a transform that cuts out a part of the image, at its own scale, every other time.

    Args:
        least: of each side of the image, as a share; images come out smaller, of any shape; padding makes them alike.
        keep: a box stays if at least this share of its area lies in the part; it is cut to it. When none stays, the
            image is left as it is.
    """

    def apply(image, label, random):
        if random.rand() >= 0.5:
            return image, label
        height, width = image.shape[:2]
        part_height, part_width = (max(1, round(side * random.uniform(least, 1))) for side in (height, width))
        top, left = random.randint(height - part_height + 1), random.randint(width - part_width + 1)
        inside = label.copy()
        inside[:, [0, 2]] = np.clip(label[:, [0, 2]] - left, 0, part_width - 1)
        inside[:, [1, 3]] = np.clip(label[:, [1, 3]] - top, 0, part_height - 1)
        stays = (_areas(inside) >= keep * _areas(label)) & (inside[:, 2] > inside[:, 0]) & (inside[:, 3] > inside[:, 1])
        if len(label) and not stays.any():
            return image, label
        return image[top : top + part_height, left : left + part_width], inside[stays]

    return apply


def resize(short: int, longest: int | None = None) -> Transform:
    """Make a transform that scales the image, and its boxes with it, without a random number.

    The shorter side gets `short` pixels, unless the longer one would then have more than `longest`.
    """

    def apply(image, label, random):
        height, width = image.shape[:2]
        scale = short / min(height, width)
        if longest is not None:
            scale = min(scale, longest / max(height, width))
        size = np.array([max(1, round(width * scale)), max(1, round(height * scale))])
        label = label.copy()
        label[:, :4] = (label[:, :4] + [0, 0, 1, 1]) * np.tile(size / [width, height], 2) - [0, 0, 1, 1]
        return resized(image, *size.tolist()), label

    return apply


def without_difficult(image, label, random):
    """Leave out the boxes that the annotators call difficult (COCO: crowds), which many do in training."""
    return image, label[label[:, 5] == 0]


def _areas(label):
    return (label[:, 2] - label[:, 0] + 1) * (label[:, 3] - label[:, 1] + 1)


def pad(labels: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """The boxes of several images, (N, K) each, as one (B, rows, K) float32 array; more are cut off, and none is -1.

    Example:
        >>> pad([np.ones((1, 2)), np.ones((0, 2))], rows=2).tolist()
        [[[1.0, 1.0], [-1.0, -1.0]], [[-1.0, -1.0], [-1.0, -1.0]]]
    """
    return padded([label[:rows] for label in labels], (rows, labels[0].shape[1]), -1, np.float32)
