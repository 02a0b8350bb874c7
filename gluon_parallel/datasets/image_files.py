"""Image files: checked before training, and read during it."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..compat.deferred import Deferred
from ..errors import DatasetCorrupt

Image = Deferred("PIL.Image")


class DataError(NamedTuple):
    """One error in a file of a data set."""

    kind: str  # in a few words, the same for all of the kind
    where: str  # the file
    detail: str = ""
    broken: bool = False  # the whole sample cannot be used


class BrokenSample(Exception):
    """A sample cannot be used; `error` says why."""

    def __init__(self, kind: str, where: object, detail: str = ""):
        super().__init__(kind)
        self.error = DataError(kind, str(where), detail, broken=True)


def read_image(path: Path) -> np.ndarray:
    """Decode a file that Pillow reads, as (H, W, 3) uint8, red first; grey images get three equal channels."""
    try:
        with whole_files_only(), Image.open(path) as file:
            return np.array(file.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise DatasetCorrupt(
            f"{path}: the image cannot be read ({error}), although it could when the data set was made; replace it"
        ) from error


def inspect_image(path: Path) -> tuple[int, int]:
    """The width and height of an image; BrokenSample: it is not there, or cannot be read.

    All of it is decoded, at an eighth of its size where that is possible.
    """
    if not path.is_file():
        raise BrokenSample("missing image", path)
    try:
        with whole_files_only(), Image.open(path) as file:
            size = file.size
            file.draft("RGB", (max(1, size[0] // 8), max(1, size[1] // 8)))
            file.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        words = " ".join(str(error).split())  # in one line
        raise BrokenSample("unreadable image", path, words.replace(repr(str(path)), "the file")) from error
    return size


class _Reading:
    lock = threading.Lock()
    now = 0  # how many read at this moment
    told = False  # what Pillow was told before the first of them
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


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
