"""Batches of images with masks: normalised images, and masks of int32 in which -1 does not count."""

from __future__ import annotations

import numpy as np

from ..pictures import as_input
from ..samples import SampleBatches, padded


def _collate(samples):
    images, masks = zip(*samples)
    inputs = as_input(images)
    return inputs, padded(masks, inputs.shape[2:], -1, np.int32)


def batches(dataset, batch_size, transform=None, **options) -> SampleBatches:
    """Cut a data set of images with masks into batches; smaller images are padded, and their masks with -1.

    Args:
        dataset: items are (image (H, W, 3) uint8, mask (H, W) int32).
        batch_size, transform, options: as for :func:`gluon_parallel.datasets.detection.batches`, with the mask for the
            label.

    Returns:
        An iterable of (images (B, 3, H, W) float32, masks (B, H, W) int32), new in every pass, with ``len()`` and
        ``set_epoch(epoch, start=0)``.

    Raises:
        BatchMismatch: the data set is empty, or an argument makes no sense.

    Example:
        >>> data = [(np.zeros((2, side, 3), np.uint8), np.ones((2, side), np.int32)) for side in (2, 3)]
        >>> [(images, masks)] = batches(data, batch_size=2)
        >>> images.shape, masks.tolist()
        ((2, 3, 2, 3), [[[1, 1, -1], [1, 1, -1]], [[1, 1, 1], [1, 1, 1]]])
    """
    return SampleBatches(dataset, _collate, batch_size, transform, **options)
