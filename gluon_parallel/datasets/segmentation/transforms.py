"""What may be done to an image with a mask before a net sees it; each is a function (image, mask, random)."""

from __future__ import annotations

import numpy as np

from ..pictures import resized
from ..transforms import Transform

VOID = -1


def flip(image: np.ndarray, mask: np.ndarray, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Mirror left and right, every other time. Not for digits and letters."""
    if random.rand() >= 0.5:
        return image, mask
    return image[:, ::-1], mask[:, ::-1]


def resize(short: int, scales: tuple[float, float] = (1.0, 1.0)) -> Transform:
    """Make a transform that scales the image, and its mask with it.

    Args:
        short: pixels of the shorter side, times
        scales: a factor between these two, drawn anew each time.
    """

    def apply(image, mask, random):
        height, width = image.shape[:2]
        scale = short / min(height, width) * random.uniform(*scales)
        size = max(1, round(width * scale)), max(1, round(height * scale))
        return resized(image, *size), resized(mask, *size)

    return apply


def crop(side: int) -> Transform:
    """Make a transform after which every image is a square, a random part; where the image is smaller it is padded.

    Args:
        side: pixels. What is padded has ImageNet's mean for its colour, and -1 in the mask.
    """

    def apply(image, mask, random):
        height, width = image.shape[:2]
        top, left = (random.randint(max(1, length - side + 1)) for length in (height, width))
        part, cut = (array[top : top + side, left : left + side] for array in (image, mask))
        missing = [(0, side - part.shape[0]), (0, side - part.shape[1])]
        if any(more for _, more in missing):
            whole = np.tile(np.array(_MEAN_COLOUR, np.uint8), (side, side, 1))
            whole[: part.shape[0], : part.shape[1]] = part
            part, cut = whole, np.pad(cut, missing, constant_values=VOID)
        return part, cut

    return apply


_MEAN_COLOUR = (124, 116, 104)  # of ImageNet's photographs: about 0 after normalising
