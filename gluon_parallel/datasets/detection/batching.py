"""Batches of images with boxes: normalised images, and labels padded with -1 to the same number of boxes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..pictures import as_input
from ..samples import SampleBatches, padded


def pad(labels: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """Put the boxes of several images into one array.

    Args:
        labels: (N, K) each, N may differ and be 0.
        rows: boxes per image in the result; what an image has beyond is cut off.

    Returns:
        (B, rows, K) float32; where there is no box, -1.

    Example:
        >>> pad([np.ones((1, 2)), np.ones((0, 2))], rows=2).tolist()
        [[[1.0, 1.0], [-1.0, -1.0]], [[-1.0, -1.0], [-1.0, -1.0]]]
    """
    return padded([label[:rows] for label in labels], (rows, labels[0].shape[1]), -1, np.float32)


def batches(dataset, batch_size, transform=None, max_boxes=None, **options) -> SampleBatches:
    """Cut a data set of images with boxes into batches.

    Args:
        dataset: items are (image (H, W, 3) uint8, label (N, K) float32).
        batch_size: images per batch and worker.
        transform: function (image, label, random) -> (image, label), for instance :func:`compose` of some. Digits must
            not be flipped.
        max_boxes: rows of every label, so that nets see one shape; None: as many as the image with most boxes has,
            where the data set knows, else as the batch needs.
        options: num_threads, shuffle, seed, last_batch, rank and num_workers, as for :class:`SampleBatches`.

    Returns:
        An iterable of (images (B, 3, H, W) float32, labels (B, M, K) float32), new in every pass, with ``len()`` and
        ``set_epoch(epoch, start=0)``.

    Raises:
        BatchMismatch: the data set is empty, or an argument makes no sense.

    Example:
        >>> data = [(np.zeros((8, 8, 3), np.uint8), np.ones((boxes, 6), np.float32)) for boxes in (2, 0, 3)]
        >>> [(images.shape, labels.shape) for images, labels in batches(data, batch_size=2)]
        [((2, 3, 8, 8), (2, 2, 6)), ((1, 3, 8, 8), (1, 3, 6))]
    """
    rows = getattr(dataset, "max_boxes", None) if max_boxes is None else max_boxes

    def collate(samples):
        images, labels = zip(*samples)
        return as_input(images), pad(labels, max([1, *map(len, labels)]) if rows is None else rows)

    return SampleBatches(dataset, collate, batch_size, transform, **options)
