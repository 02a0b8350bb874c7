"""Image files: checked before training, and read during it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DatasetCorrupt
from .data_errors import DataError


def read_image(path: Path) -> np.ndarray:
    """Decode an image file.

    Args:
        path: of a JPEG or PNG file, or what else Pillow reads; grey ones get three equal channels.

    Returns:
        (H, W, 3) uint8, red first.

    Raises:
        DatasetCorrupt: it is not there, or no image, or cut off.
    """
    from PIL import Image

    try:
        with whole_files_only(), Image.open(path) as file:
            return np.array(file.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise DatasetCorrupt(
            f"{path}: the image cannot be read ({error}); replace it, or build the data set with verify=True, which "
            "finds such images beforehand"
        ) from error


def inspect_image(path: Path, whole: bool) -> tuple[int, int] | DataError:
    """Tell the size of an image, and whether it can be read.

    Args:
        path: of the file.
        whole: decode all of it, at an eighth of its size where the format allows; else only read the header.

    Returns:
        (width, height), or what is wrong.
    """
    from PIL import Image

    if not path.is_file():
        return DataError("missing image", str(path), broken=True)
    try:
        with whole_files_only(), Image.open(path) as file:
            size = file.size
            if whole:
                file.draft("RGB", (max(1, size[0] // 8), max(1, size[1] // 8)))
                file.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        return DataError("unreadable image", str(path), _one_line(error, path), broken=True)
    return size


class _Reading:
    lock = threading.Lock()
    now = 0  # how many read at this moment
    told = False  # what Pillow was told before the first of them


@contextlib.contextmanager
def whole_files_only() -> Iterator[None]:
    """Let Pillow refuse files that are cut off: importing GluonCV tells it to fill them with grey, everywhere."""
    from PIL import ImageFile

    with _Reading.lock:
        if _Reading.now == 0:
            _Reading.told, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
        _Reading.now += 1
    try:
        yield
    finally:
        with _Reading.lock:
            _Reading.now -= 1
            if _Reading.now == 0:
                ImageFile.LOAD_TRUNCATED_IMAGES = _Reading.told


def in_threads(function: Callable[..., Any], *arguments: Iterable[Any]) -> list[Any]:
    """``list(map(function, *arguments))``, on as many threads as cores: Pillow decodes without Python's lock."""
    with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0))), "gp-index") as pool:
        return list(pool.map(function, *arguments))


def _one_line(error, path):
    """Pillow's words without the path, which stands beside them already."""
    return " ".join(str(error).split()).replace(repr(str(path)), "the file")
