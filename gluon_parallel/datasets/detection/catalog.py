"""Detection data sets by name, for training and for evaluation."""

from __future__ import annotations

import os
from typing import Any

from .. import coco, scenes, voc
from ..task import Source, Task, load_task


def _scenes(folder, **options):
    train, test = (voc.Detection(folder, split, scenes.CLASSES, **options) for split in ("train", "test"))
    return train.with_boxes(), test


def _voc(folder, **options):
    train = voc.Detection(folder, [(2007, "trainval"), (2012, "trainval")], **options)
    return train.with_boxes(), voc.Detection(folder, [(2007, "test")], **options)


def _coco(folder, **options):
    train, test = (coco.Detection(folder, split, **options) for split in ("train2017", "val2017"))
    return train.with_boxes(), test


_SOURCES = {
    "scenes": Source((), _scenes),
    "voc": Source(("VOC2007", "VOC2012"), _voc),
    "coco": Source(("annotations", "train2017", "val2017"), _coco),
}
NAMES = tuple(_SOURCES)


def load(name: str, root: str | os.PathLike[str] | None = None, *options: Any, **more: Any) -> Task:
    """Find a data set with boxes, and look at all its files.

    Args:
        name: "scenes" (digits on photographs, written when they are not there yet), "voc" (VOC2007 and VOC2012
            trainval to train with, VOC2007 test) or "coco" (train2017, val2017).
        root, options, more: as for :func:`gluon_parallel.datasets.task.load_task`: num_train, num_test, broken, verify,
            in_memory and size.
    """
    return load_task(_SOURCES, "boxes", name, root, *options, **more)
