"""CIFAR-10: 60,000 photographs in six files, in an archive or a folder, in the binary or the Python version."""

import io
import pickle
from pathlib import Path

import numpy as np

from ..errors import DatasetCorrupt
from .dataset import Dataset, Part, as_part
from .folder import obtain, read_files
from .published import CIFAR10

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"
_IMAGE = (3, 32, 32)  # red plane, green plane, blue plane
_PIXELS = 3 * 32 * 32
_RECORD = 1 + _PIXELS  # one byte for the label before each image
_MOST_BYTES = 2**26  # twice what a published file holds: a forged archive must not fill the memory

# Under which names the data may lie in the folder: unpacked before packed, binary before Python.
_BINARY = ("cifar-10-batches-bin", f"{TRAIN[0]}.bin", CIFAR10.name)
_PYTHON = ("cifar-10-batches-py", TRAIN[0], "cifar-10-python.tar.gz")


def cifar10(folder: Path, download: bool) -> Dataset[Part]:
    """Load CIFAR-10's 50,000 + 10,000 colour images of 32x32 pixels from `folder`."""
    place = obtain("cifar10", CIFAR10, folder, download, also=_BINARY + _PYTHON)
    source = place.parent if place.stem == TRAIN[0] else place
    parts = {}
    for found, content in read_files(source, r"(data_batch_[1-5]|test_batch)(\.bin)?", _MOST_BYTES, "CIFAR-10"):
        name, ending = found.groups(default="")
        images, labels = (_read_records if ending else read_pickled)(content, f"{source}, {name}{ending}")
        parts[name] = images.reshape(-1, *_IMAGE), labels
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


def _read_records(content, where):
    """Take a file of the binary version apart: 3,073 bytes per image, the first of them the label."""
    if len(content) % _RECORD:
        raise DatasetCorrupt(
            f"{where}: {len(content)} bytes are no multiple of the {_RECORD} that one image takes; the file is cut off "
            "or another kind of file: replace it by the published one"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD)
    return records[:, 1:], records[:, 0]


class _Unpickler(pickle._Unpickler):  # the one in C can be made to fill the memory by a forged number
    """A pickle may name any function to be called; this one takes the three names that a NumPy array is made of."""

    _KNOWN = {"_reconstruct": np.array([]).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}

    def find_class(self, module, name):
        if f"{module}.{name}" not in ("numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype"):
            raise pickle.UnpicklingError(f"it wants to call {module}.{name}")
        return self._KNOWN[name]


def read_pickled(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """The images (N, 3072) and labels (N,), both uint8, that a pickled dictionary has as b"data" and b"labels"."""
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()  # Python 2 wrote these files
        images, labels = batch[b"data"], np.array(batch[b"labels"])
        if images.dtype != np.uint8 or images.shape[1:] != (_PIXELS,):
            raise ValueError(f"data of type {images.dtype} and shape {images.shape}, not (N, {_PIXELS}) of bytes")
        if labels.dtype.kind not in "iu" or labels.ndim != 1 or np.any((labels < 0) | (labels > 255)):
            raise ValueError("its labels are not a list of small integers")
    except Exception as error:  # a damaged pickle can fail in every way that Python knows
        raise DatasetCorrupt(
            f"{where}: not a file of CIFAR-10's Python version, or damaged ({type(error).__name__}: {error}); replace "
            "it by the published one"
        ) from error
    return images, labels.astype(np.uint8)
