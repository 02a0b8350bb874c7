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


class BrokenSample(DatasetCorrupt):
    """A sample cannot be used; `error` says why."""

    def __init__(self, kind: str, where: object, detail: str = ""):
        super().__init__(f"{where}: {kind}{detail and f' ({detail})'}; replace it, and make the data set anew")
        self.error = DataError(kind, str(where), detail, broken=True)


@contextlib.contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Read the file in this block of code; BrokenSample: it is not there, or cannot be read."""
    if not path.is_file():
        raise BrokenSample(f"missing {what}", path)
    try:
        with _whole_files_only():
            yield
    # SyntaxError: broken PNG and XML; ValueError: also an encoding that nobody knows.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        words = " ".join(str(error).split()).replace(repr(str(path)), "the file")  # in one line
        raise BrokenSample(f"unreadable {what}", path, words) from error


def read_image(path: Path) -> np.ndarray:
    """Decode a file that Pillow reads, as (H, W, 3) uint8, red first; grey images get three equal channels."""
    with reading(path, "image"), Image.open(path) as file:
        return np.array(file.convert("RGB"))


def read_mask(path: Path) -> np.ndarray:
    """The classes of an image's pixels, (H, W) uint8."""
    with reading(path, "mask"), Image.open(path) as file:
        if file.mode not in ("P", "L"):
            raise ValueError(f"a mask has one byte per pixel, its class; this is an image of mode {file.mode}")
        return np.array(file)


def inspect_image(path: Path) -> tuple[int, int]:
    """The width and height of an image. All of it is decoded, at an eighth of its size where that is possible."""
    with reading(path, "image"), Image.open(path) as file:
        width, height = file.size
        file.draft("RGB", (max(1, width // 8), max(1, height // 8)))
        file.load()
    return width, height


class _Reading:
    lock = threading.Lock()
    now = 0  # how many read at this moment
    told = False  # what Pillow was told before the first of them
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


@contextlib.contextmanager
def _whole_files_only() -> Iterator[None]:
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
