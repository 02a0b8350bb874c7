"""CIFAR-10: 60,000 photographs in six files, in an archive or a folder, in the binary or the Python version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import DatasetCorrupt
from .cifar_pickle import read_pickled
from .dataset import Dataset, as_part
from .folder import obtain
from .packed import unpack
from .published import CIFAR10

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"
_IMAGE = (3, 32, 32)  # red plane, green plane, blue plane
_RECORD = 1 + 3 * 32 * 32  # one byte for the label before each image
_MOST_BYTES = 2**26  # twice what a published file holds: a forged archive must not fill the memory

# Under which names the data may lie in the folder: unpacked before packed, binary before Python.
_BINARY = ("cifar-10-batches-bin", f"{TRAIN[0]}.bin", CIFAR10.name)
_PYTHON = ("cifar-10-batches-py", TRAIN[0], "cifar-10-python.tar.gz")


def cifar10(folder: Path, download: bool) -> Dataset:
    """Load CIFAR-10's 50,000 + 10,000 colour images of 32x32 pixels from `folder`."""
    place = obtain("cifar10", CIFAR10, folder, download, also=_BINARY + _PYTHON)
    source = place.parent if place.stem == TRAIN[0] else place
    parts = dict(read_batches(source))
    missing = [name for name in (*TRAIN, TEST) if name not in parts]
    if missing:
        raise DatasetCorrupt(
            f"{source}: {', '.join(missing)} (with the ending .bin in the binary version) not found in it; put all six "
            f"files there, or the published {CIFAR10.name} into {folder}"
        )
    train = [parts[name] for name in TRAIN]
    return Dataset(
        name="cifar10",
        train=as_part([images for images, _ in train], [labels for _, labels in train], len(CLASSES), str(source)),
        test=as_part([parts[TEST][0]], [parts[TEST][1]], len(CLASSES), f"{source}, {TEST}"),
        num_classes=len(CLASSES),
        classes=CLASSES,
    )


def read_batches(source: Path) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Read the six files in a folder or a tar archive; other files in it are passed over, and nothing is unpacked.

    Args:
        source: the folder or archive.

    Yields:
        A file's name without ending, and its images (N, 3, 32, 32) and labels (N,), both uint8.

    Raises:
        DatasetCorrupt: the archive or a file in it is damaged or in another format.
    """
    for file, content in _from_folder(source) if source.is_dir() else _from_archive(source):
        where = f"{source}, {file}"
        if file.endswith(".bin"):
            yield file[: -len(".bin")], read_records(content, where)
        else:
            images, labels = read_pickled(content, where, size=_RECORD - 1)
            yield file, (images.reshape(-1, *_IMAGE), labels)


def read_records(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Take a file of the binary version apart: 3,073 bytes per image, the first of them the label.

    Args:
        content: the file.
        where: its name, for the error message.

    Returns:
        Images (N, 3, 32, 32) and labels (N,), both uint8.

    Raises:
        DatasetCorrupt: the last record is not whole.

    Example:
        >>> images, labels = read_records(bytes([7]) + bytes(3072), "here")
        >>> images.shape, labels.tolist()
        ((1, 3, 32, 32), [7])
    """
    if len(content) % _RECORD:
        raise DatasetCorrupt(
            f"{where}: {len(content)} bytes are no multiple of the {_RECORD} that one image takes; the file is cut off "
            "or another kind of file: replace it by the published one"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD)
    return records[:, 1:].reshape(-1, *_IMAGE), records[:, 0]


def _wanted(file: str) -> bool:
    stem = file[: -len(".bin")] if file.endswith(".bin") else file
    return stem == TEST or stem in TRAIN


def _from_folder(folder):
    for path in sorted(folder.iterdir()):
        if _wanted(path.name) and path.is_file():
            yield path.name, path.read_bytes()


def _from_archive(path):
    for name, content in unpack(path, lambda name: _wanted(_base(name)), _MOST_BYTES, "CIFAR-10"):
        yield _base(name), content


def _base(name: str) -> str:
    return name.rsplit("/", 1)[-1]
