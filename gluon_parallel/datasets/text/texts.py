"""Texts with their labels, a part of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...errors import DatasetCorrupt


class Texts(NamedTuple):
    """Texts with their labels."""

    texts: tuple[str, ...]
    labels: np.ndarray  # (N,) int32 in [0, num_classes)


def as_texts(texts: Sequence[str], labels: Sequence[int], where: str) -> Texts:
    """The texts that a file holds, or the error that it holds none."""
    if not texts:
        raise DatasetCorrupt(f"{where}: no texts at all; replace it by the published one")
    return Texts(tuple(texts), np.array(labels, np.int32))
