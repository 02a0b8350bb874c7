"""Transforms of an image with its boxes or its mask: functions (image, label, random), and their composition."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Transform = Callable[[np.ndarray, np.ndarray, np.random.RandomState], "tuple[np.ndarray, np.ndarray]"]


def compose(*transforms: Transform) -> Transform:
    """One transform that does several, one after the other."""

    def apply(image, label, random):
        for transform in transforms:
            image, label = transform(image, label, random)
        return image, label

    return apply
