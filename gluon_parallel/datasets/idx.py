"""Read a file in the IDX format, in which MNIST and its successors are published."""

from __future__ import annotations

import gzip
import math
import os
import zlib

import numpy as np

from ..errors import DatasetCorrupt

_UINT8 = 0x08  # the format's code for unsigned bytes, the only type that these data sets use
_MOST_BYTES = 2**30  # more than any published file of this kind holds; a damaged header can claim anything
_KINDS = {1: "labels", 3: "images"}


def read_idx(path: str | os.PathLike[str], num_dims: int) -> np.ndarray:
    """Read an IDX file of bytes, plain or compressed with gzip (its first bytes tell, not its name).

    Layout, big-endian: two zero bytes, the type, the number of dimensions; each dimension as uint32; the values.

    Args:
        path: the file.
        num_dims: 3 for images (N, height, width), 1 for labels (N,).

    Raises:
        DatasetCorrupt: it is not such a file, or it holds fewer or more values than it states.
    """
    try:
        with open(path, "rb") as plain:
            compressed = plain.read(2) == b"\x1f\x8b"
        with (gzip.open if compressed else open)(path, "rb") as file:
            shape = _shape(file.read(4 + 4 * num_dims), num_dims)
            size = math.prod(shape)
            values = file.read(size)
            surplus = file.read(1)  # also lets gzip compare its checksum, which stands at the end
        if len(values) < size:
            raise ValueError(f"it is cut off: {len(values)} of the {size} bytes that it states for shape {shape}")
        if surplus:
            raise ValueError(f"it holds more than the {size} bytes that it states for shape {shape}")
    except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        what = error if isinstance(error, ValueError) else f"its gzip compression is damaged or cut off ({error})"
        raise DatasetCorrupt(
            f"{os.fspath(path)}: {what}; delete it, so that it is downloaded again, or replace it"
        ) from error
    return np.frombuffer(values, np.uint8).reshape(shape)


def _shape(header, num_dims):
    wanted = bytes([0, 0, _UINT8, num_dims])
    if header[:4] != wanted:
        got = header[:4].hex(" ") or "nothing"
        raise ValueError(f"it starts with {got} where an IDX file of {_KINDS[num_dims]} starts with {wanted.hex(' ')}")
    if len(header) < 4 + 4 * num_dims:
        raise ValueError("it is cut off within its header")
    shape = tuple(int(side) for side in np.frombuffer(header, ">u4")[1:])
    if math.prod(shape) > _MOST_BYTES:
        raise ValueError(f"it states a shape of {shape}, which no published file has")
    return shape
