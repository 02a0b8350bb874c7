"""Batches of images with masks: normalised images, and masks of int32 in which -1 does not count."""

from __future__ import annotations

import numpy as np

from ..pictures import as_input
from ..samples import SampleBatches


def batches(
    dataset, batch_size, transform=None, multiple=1, shuffle=False, seed=0, last_batch="keep", rank=0, num_workers=1,
    num_threads=0,
) -> SampleBatches:  # fmt: skip
    """Cut a data set of images with masks into batches; smaller images are padded, and their masks with -1.

    Args:
        dataset: items are (image (H, W, 3) uint8, mask (H, W) int32).
        batch_size: images per batch and worker.
        transform: function (image, mask, random) -> (image, mask), for instance :func:`compose` of some; `random` is a
            ``numpy.random.RandomState``, see :class:`SampleBatches`. Digits must not be flipped.
        multiple: height and width are padded to a multiple.
        shuffle, seed, last_batch, rank, num_workers: as for :func:`gluon_parallel.datasets.batches`.
        num_threads: threads that read ahead.

    Returns:
        An iterable of (images (B, 3, H, W) float32, masks (B, H, W) int32), new in every pass, with ``len()``,
        ``set_epoch(epoch, start=0)`` and ``numbers(batch)``.

    Raises:
        BatchMismatch: the data set is empty, or an argument makes no sense.

    Example:
        >>> data = [(np.zeros((2, side, 3), np.uint8), np.ones((2, side), np.int32)) for side in (2, 3)]
        >>> [(images, masks)] = batches(data, batch_size=2)
        >>> images.shape, masks.tolist()
        ((2, 3, 2, 3), [[[1, 1, -1], [1, 1, -1]], [[1, 1, 1], [1, 1, 1]]])
    """

    def collate(samples):
        images, masks = zip(*samples)
        inputs = as_input(images, multiple)
        padded = np.full((len(masks), *inputs.shape[2:]), -1, np.int32)
        for place, mask in zip(padded, masks):
            place[: mask.shape[0], : mask.shape[1]] = mask
        return inputs, padded

    return SampleBatches(
        dataset, collate, batch_size, transform, shuffle, seed, last_batch, rank, num_workers, num_threads
    )
