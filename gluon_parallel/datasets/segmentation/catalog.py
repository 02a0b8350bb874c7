"""Segmentation data sets by name, for training and for evaluation."""

from __future__ import annotations

import os
from typing import Any

from .. import scenes, voc
from ..task import Source, Task, load_task


def _scenes(folder, **options):
    return [voc.Segmentation(folder, split, scenes.CLASSES, **options) for split in ("train", "test")]


def _voc(folder, **options):
    return [voc.Segmentation(folder, [(2012, split)], **options) for split in ("train", "val")]


_SOURCES = {"scenes": Source((), _scenes), "voc": Source(("VOC2012",), _voc)}
NAMES = tuple(_SOURCES)


def load(name: str, root: str | os.PathLike[str] | None = None, *options: Any, **more: Any) -> Task:
    """Find a data set with masks, and look at all its files.

    Args:
        name: "scenes" (digits on photographs, written when they are not there yet) or "voc" (VOC2012 train and val).
        root, options, more: as for :func:`gluon_parallel.datasets.task.load_task`: num_train, num_test, broken, verify,
            in_memory and size.
    """
    return load_task(_SOURCES, "masks", name, root, *options, **more)
