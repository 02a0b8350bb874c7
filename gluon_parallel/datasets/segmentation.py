"""Segmentation data: data sets with masks by name (a new one is entered here), random transforms, batches.

The names are "scenes" (digits on photographs) and "voc" (VOC2012 train and val).

A transform is a function (image, mask, random). Pixels that are -1 in the mask do not count.
"""

import functools

import numpy as np

from . import scenes, voc
from .catalog import Source, Task
from .pictures import as_input, resized
from .samples import SampleBatches, Transform, padded
from .samples import compose as compose
from .voc import VOID

_MEAN_COLOUR = (124, 116, 104)  # of ImageNet's photographs: about 0 after normalising

_TASK = Task(
    "masks",
    {
        "scenes": Source((), functools.partial(voc.Segmentation, classes=scenes.CLASSES), "train", "test"),
        "voc": Source(("VOC2012",), voc.Segmentation, [(2012, "train")], [(2012, "val")]),
    },
)
NAMES, load = tuple(_TASK.sources), _TASK.load


def flip(image: np.ndarray, mask: np.ndarray, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Mirror left and right, every other time. Not for digits and letters."""
    if random.rand() >= 0.5:
        return image, mask
    return image[:, ::-1], mask[:, ::-1]


def resize(short: int, scales: tuple[float, float] = (1.0, 1.0)) -> Transform:
    """Make a transform that scales the image, and its mask with it, to a shorter side of `short` pixels.

    That is multiplied by a factor between the two `scales`, drawn anew each time.
    """

    def apply(image, mask, random):
        height, width = image.shape[:2]
        scale = short / min(height, width) * random.uniform(*scales)
        size = max(1, round(width * scale)), max(1, round(height * scale))
        return resized(image, *size), resized(mask, *size)

    return apply


def crop(side: int) -> Transform:
    """Make a transform after which every image is a square of `side` pixels, a random part of what it was.

    Where the image is smaller it is padded, with ImageNet's mean for its colour, and -1 in the mask.
    """

    def apply(image, mask, random):
        height, width = image.shape[:2]
        top, left = (random.randint(max(1, length - side + 1)) for length in (height, width))
        part, cut = (array[top : top + side, left : left + side] for array in (image, mask))
        return (
            padded([part], (side, side, 3), _MEAN_COLOUR, np.uint8)[0],
            padded([cut], (side, side), VOID, np.int32)[0],
        )

    return apply


def batches(dataset, batch_size, transform=None, **options) -> SampleBatches:
    """Cut a data set of images with masks into batches; smaller images are padded, and their masks with -1.

    Args:
        dataset: items are (image (H, W, 3) uint8, mask (H, W) int32).
        batch_size: images per batch and worker.
        transform: function (image, mask, random) -> (image, mask), for instance :func:`compose` of some.
        options: num_threads, shuffle, seed, last_batch, rank and num_workers, as for :class:`SampleBatches`.

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


def _collate(samples):
    images, masks = zip(*samples)
    inputs = as_input(images)
    return inputs, padded(masks, inputs.shape[2:], -1, np.int32)
