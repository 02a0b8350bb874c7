"""Data sets of images with labels, by name: MNIST and Fashion-MNIST, CIFAR-10, and scikit-learn's digits."""

from __future__ import annotations

import functools
import gzip
import math
import os
import zlib
from pathlib import Path

import numpy as np

from ..errors import DatasetCorrupt
from . import published
from .dataset import Dataset, Part, as_part, data_folder, find, obtain, read_files

DIGITS = tuple("0123456789")
CLOTHES = tuple("T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot".split(","))
CIFAR10 = "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"
_UINT8 = 0x08  # the IDX format's code for unsigned bytes, the only type that these data sets use
_CIFAR_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
_IMAGE = (3, 32, 32)  # of CIFAR-10: red plane, green plane, blue plane
_MOST_BYTES = 2**26  # twice what a published file holds: a forged archive must not fill the memory
_SPLIT_SEED = 0  # of the digits' one fixed split; with another seed accuracies cannot be compared
_TEST_SHARE = 0.2  # of every class


def _idx_set(name: str, classes: tuple[str, ...], folder: Path, download: bool) -> Dataset[Part]:
    """MNIST or Fashion-MNIST: 60,000 + 10,000 grey images of 28x28 pixels, in four files."""
    files = {"mnist": published.MNIST, "fashion_mnist": published.FASHION_MNIST}[name]
    # All four are there before the first is read, so that a missing one is noticed at once.
    paths = [obtain(name, file, folder, download, also=[file.name[: -len(".gz")]]) for file in files]
    parts = []
    for path, labels_path in (paths[:2], paths[2:]):
        images, labels = read_idx(path, num_dims=3), read_idx(labels_path, num_dims=1)
        if images.shape[1:] != (28, 28):
            raise DatasetCorrupt(
                f"{path}: images of {images.shape[1]}x{images.shape[2]} pixels, not 28x28; this is another data set's "
                "file: replace it by the published one"
            )
        parts.append(as_part([(images[:, None], labels)], len(classes), f"{path} and {labels_path.name}"))
    train, test = parts
    return Dataset(name, train, test, classes)


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


def _cifar10(folder: Path, download: bool) -> Dataset[Part]:
    """CIFAR-10: 50,000 + 10,000 colour images of 32x32 pixels, in six files of its binary version."""
    unpacked = "cifar-10-batches-bin", _CIFAR_FILES[0]  # in a folder of their own, or in this one
    path = obtain("cifar10", published.CIFAR10, folder, download, also=unpacked)
    source = path.parent if path.name == _CIFAR_FILES[0] else path
    files = {}
    for found, content in read_files(source, r"((?:data_batch_[1-5]|test_batch)\.bin)", _MOST_BYTES, "CIFAR-10"):
        name, record = found[1], 1 + math.prod(_IMAGE)  # one byte for the label before each image
        if len(content) % record:
            raise DatasetCorrupt(
                f"{source}, {name}: {len(content)} bytes are no multiple of the {record} that one image takes; the "
                "file is cut off or another kind of file: replace it by the published one"
            )
        records = np.frombuffer(content, np.uint8).reshape(-1, record)
        files[name] = records[:, 1:].reshape(-1, *_IMAGE), records[:, 0]
    missing = [name for name in _CIFAR_FILES if name not in files]
    if missing:
        raise DatasetCorrupt(
            f"{source}: {', '.join(missing)} not found in it; put all six files there, or the published "
            f"{published.CIFAR10.name} into {folder}"
        )
    train, test = (
        as_part([files[name] for name in names], len(CIFAR10), str(source))
        for names in (_CIFAR_FILES[:5], _CIFAR_FILES[5:])
    )
    return Dataset("cifar10", train, test, CIFAR10)


def enlarge(images: np.ndarray) -> np.ndarray:
    """Images (N, 8, 8) interpolated linearly to 24x24 pixels and framed with two zeros: (N, 28, 28) float32."""
    centres = (np.arange(24) + 0.5) / 3 - 0.5  # of the new pixels, in units of the old ones
    weights = np.stack([np.interp(centres, np.arange(8), unit) for unit in np.eye(8)], axis=1)  # (24, 8)
    return np.pad((weights @ images @ weights.T).astype(np.float32), [(0, 0), (2, 2), (2, 2)])


def stratified_split(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices to train and to test with, each ascending: the same share of every class, alike with every NumPy."""
    random = np.random.RandomState(_SPLIT_SEED)  # NumPy has frozen its stream; that of `default_rng` may change
    test = []
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        test.append(members[: round(_TEST_SHARE * len(members))])
    chosen = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


def _digits(folder: Path, download: bool) -> Dataset[Part]:
    """scikit-learn's handwritten digits, 1,438 + 359 images of 8x8 pixels enlarged to 28x28, as MNIST's are.

    The writers are not known, so the same hand may occur in both parts.
    """
    from sklearn.datasets import load_digits  # here, because importing scikit-learn takes longer than all the rest

    source = load_digits()
    images = enlarge(source.images / 16)[:, np.newaxis]  # (N, 1, 28, 28)
    labels = source.target.astype(np.int32)
    train, test = (Part(images[part], labels[part]) for part in stratified_split(labels))
    return Dataset("digits", train, test, DIGITS)


_LOAD = {
    "digits": _digits,
    "fashion_mnist": functools.partial(_idx_set, "fashion_mnist", CLOTHES),
    "mnist": functools.partial(_idx_set, "mnist", DIGITS),
    "cifar10": _cifar10,
}
NAMES = tuple(_LOAD)


def load(name: str, root: str | os.PathLike[str] | None = None, download: bool = True) -> Dataset[Part]:
    """Load a data set into memory.

    Args:
        name: "digits" (1,797 images of 28x28, embedded), "fashion_mnist" or "mnist" (70,000 of 28x28), "cifar10"
            (60,000 of 32x32 in colour).
        root: the folder with the files, ``<root>/<name>/`` or `root` itself if it is called `name`; None means what
            the environment variable GLUON_PARALLEL_DATA says, and without that ~/.gluon_parallel/datasets.
        download: fetch a file that is not there.

    Returns:
        Training and test images, (N, C, H, W) float32 in [0, 1], with their int32 labels.

    Raises:
        DatasetUnavailable: there is no such data set, or a file is neither in the folder nor to be downloaded.
        DatasetCorrupt: a file is damaged or another one.

    Example:
        >>> data = load("digits")
        >>> data.train.images.shape, data.test.labels.shape, data.num_classes
        ((1438, 1, 28, 28), (359,), 10)
    """
    return find(name, _LOAD)(data_folder(name, root), download)
