"""CIFAR-10: 60,000 photographs in six files, in an archive or a folder, in the binary or the Python version."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import DatasetCorrupt
from .cifar_pickle import read_pickled
from .dataset import Dataset, Part, as_part
from .folder import obtain
from .packed import read_files
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


def cifar10(folder: Path, download: bool) -> Dataset[Part]:
    """Load CIFAR-10's 50,000 + 10,000 colour images of 32x32 pixels from `folder`."""
    place = obtain("cifar10", CIFAR10, folder, download, also=_BINARY + _PYTHON)
    source = place.parent if place.stem == TRAIN[0] else place
    parts = dict(_read_batches(source))
    missing = [name for name in (*TRAIN, TEST) if name not in parts]
    if missing:
        raise DatasetCorrupt(
            f"{source}: {', '.join(missing)} (with the ending .bin in the binary version) not found in it; put all six "
            f"files there, or the published {CIFAR10.name} into {folder}"
        )
    images, labels = zip(*(parts[name] for name in TRAIN))
    train = as_part(images, labels, len(CLASSES), str(source))
    images, labels = parts[TEST]
    return Dataset("cifar10", train, as_part([images], [labels], len(CLASSES), f"{source}, {TEST}"), CLASSES)


def _read_batches(source: Path) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """For each of the six files in a folder or archive its name without ending, and its uint8 images and labels."""
    for found, content in read_files(source, r"(data_batch_[1-5]|test_batch)(\.bin)?", _MOST_BYTES, "CIFAR-10"):
        name, ending = found.groups(default="")
        where = f"{source}, {name}{ending}"
        if ending:
            yield name, _read_records(content, where)
        else:
            images, labels = read_pickled(content, where, size=_RECORD - 1)
            yield name, (images.reshape(-1, *_IMAGE), labels)


def _read_records(content, where):
    """Take a file of the binary version apart: 3,073 bytes per image, the first of them the label."""
    if len(content) % _RECORD:
        raise DatasetCorrupt(
            f"{where}: {len(content)} bytes are no multiple of the {_RECORD} that one image takes; the file is cut off "
            "or another kind of file: replace it by the published one"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD)
    return records[:, 1:].reshape(-1, *_IMAGE), records[:, 0]
