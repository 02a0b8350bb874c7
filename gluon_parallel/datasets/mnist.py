"""MNIST and Fashion-MNIST: four files each in the IDX format, of the same names and shapes."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from ..errors import DatasetCorrupt
from .dataset import Dataset, Part, as_part
from .folder import obtain
from .published import FASHION_MNIST, MNIST

_SIDE = 28
_NUM_CLASSES = 10
_UINT8 = 0x08  # the format's code for unsigned bytes, the only type that these data sets use
_CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion_mnist": tuple("T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot".split(",")),
}


def load(name: str, folder: Path, download: bool) -> Dataset[Part]:
    """Load the 60,000 + 10,000 images of "mnist", handwritten digits, or "fashion_mnist", clothing, from `folder`."""
    files, classes = {"mnist": MNIST, "fashion_mnist": FASHION_MNIST}[name], _CLASSES[name]
    # All four are there before the first is read, so that a missing one is noticed at once.
    paths = [obtain(name, file, folder, download, also=[file.name[: -len(".gz")]]) for file in files]
    return Dataset(name, _read_part(*paths[:2]), _read_part(*paths[2:]), classes)


def _read_part(images_path: Path, labels_path: Path) -> Part:
    images, labels = read_idx(images_path, num_dims=3), read_idx(labels_path, num_dims=1)
    if images.shape[1:] != (_SIDE, _SIDE):
        height, width = images.shape[1:]
        raise DatasetCorrupt(
            f"{images_path}: images of {height}x{width} pixels, not {_SIDE}x{_SIDE}; this is another data set's file: "
            "replace it by the published one"
        )
    return as_part([images[:, None]], [labels], _NUM_CLASSES, where=f"{images_path} and {labels_path.name}")


def read_idx(path: Path, num_dims: int) -> np.ndarray:
    """Read an IDX file of bytes, plain or compressed with gzip (its first bytes tell, not its name).

    Layout, big-endian: two zero bytes, the type, the number of dimensions (3 for images, 1 for labels); each dimension
    as uint32; the values. DatasetCorrupt: it is not such a file, or it holds fewer or more values than it states.
    """
    content, start = path.read_bytes(), bytes([0, 0, _UINT8, num_dims])
    try:
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        if content[:4] != start:
            got = content[:4].hex(" ") or "nothing"
            raise ValueError(f"it starts with {got} where an IDX file of this kind starts with {start.hex(' ')}")
        if len(content) < 4 + 4 * num_dims:
            raise ValueError("it is cut off within its header")
        shape = tuple(int(side) for side in np.frombuffer(content, ">u4", num_dims, offset=4))
        values = content[4 + 4 * num_dims :]
        if len(values) != math.prod(shape):
            raise ValueError(f"it is cut off or too long: {len(values)} bytes, where it states a shape of {shape}")
    except (EOFError, zlib.error, ValueError, OSError) as error:
        what = error if isinstance(error, ValueError) else f"its gzip compression is damaged or cut off ({error})"
        raise DatasetCorrupt(f"{path}: {what}; delete it, so that it is downloaded again, or replace it") from error
    return np.frombuffer(values, np.uint8).reshape(shape)
