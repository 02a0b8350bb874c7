"""Normalisation of photographs as for ImageNet: float32, channels first; and back."""

from collections.abc import Sequence

import numpy as np

from .indexed import Image
from .samples import padded

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's photographs, as GluonCV's nets expect


def resized(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """Scale an image (H, W, 3) uint8, by its surroundings, or a mask (H, W) int32, by its nearest pixel.

    Example:
        >>> resized(np.array([[1, -1]], np.int32), width=4, height=1).tolist()
        [[1, 1, -1, -1]]
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    kind = Image.Resampling.BILINEAR if pixels.ndim == 3 else Image.Resampling.NEAREST
    return np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).resize((width, height), kind))


def as_input(images: Sequence[np.ndarray]) -> np.ndarray:
    """Normalise images, (H, W, 3) uint8 each, to one (N, 3, H, W) float32 array, padded with 0 on the right and below.

    Example:
        >>> as_input([np.zeros((4, 6, 3), np.uint8), np.zeros((5, 2, 3), np.uint8)]).shape
        (2, 3, 5, 6)
    """
    scale = (1 / (255 * np.array(STD))).astype(np.float32)
    shift = (np.array(MEAN) / np.array(STD)).astype(np.float32)
    normalised = [(image * scale - shift).transpose(2, 0, 1) for image in images]
    return padded(normalised, np.max([image.shape for image in normalised], axis=0).tolist(), 0, np.float32)


def as_picture(inputs: np.ndarray) -> np.ndarray:
    """One image of :func:`as_input`, (3, H, W), as (H, W, 3) uint8 again; what was padding is grey-brown, the mean.

    Example:
        >>> image = np.full((2, 2, 3), 200, np.uint8)
        >>> bool((as_picture(as_input([image])[0]) == image).all())
        True
    """
    values = inputs.transpose(1, 2, 0) * np.array(STD) + np.array(MEAN)
    return np.clip(np.rint(values * 255), 0, 255).astype(np.uint8)
