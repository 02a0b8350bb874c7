"""The CUDA libraries that MXNet's library asks for by its file: found in NVIDIA's wheels and loaded by path."""

from __future__ import annotations

import glob
import mmap
import os
import re
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from .wheels import WHEELS

_CUDA = re.compile(r"lib(cuda|cudart|cublas|cublasLt|cudnn|nccl|cufft|curand|cusolver|cusparse|nvrtc|nvToolsExt)\.so")
# cuDNN loads these parts late and by name, and could take another version from LD_LIBRARY_PATH.
_CUDNN_PARTS = ("ops_infer", "ops_train", "cnn_infer", "cnn_train", "adv_infer", "adv_train")
_NEEDED = 1  # tag of an ELF file's dynamic section: the name of a library


def needed(path: os.PathLike) -> list[str]:
    """The libraries of CUDA that a library asks for, the driver's included; none for a build for CPUs.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no shared library of 64 bits, or cut off.
    """
    with open(path, "rb") as file:
        if file.read(6) != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is no shared library of 64 bits")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def text(offset: int) -> str:
        return data[offset : offset + 256].partition(b"\0")[0].decode()

    try:
        (start,) = struct.unpack_from("<Q", data, 40)
        size, count, names = struct.unpack_from("<HHH", data, 58)
        rows = [struct.unpack_from("<IIQQQQ", data, start + number * size) for number in range(count)]
        sections = {text(rows[names][4] + word): (offset, length) for word, *_, offset, length in rows}
        (offset, length), (texts, _) = sections.get(".dynamic", (0, 0)), sections.get(".dynstr", (0, 0))
        entries = struct.iter_unpack("<QQ", data[offset : offset + length])
    except struct.error as error:
        raise ValueError(f"{path} is cut off") from error
    found = [text(texts + value) for tag, value in entries if tag == _NEEDED]
    return [name for name in found if _CUDA.match(name)]


def load(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Load libraries by path, so that MXNet's finds them: the loader takes a loaded library of the same name.

    What lies beside MXNet's library comes first, then NVIDIA's wheels in this Python, then where the loader itself
    looks (``LD_LIBRARY_PATH``, the system).

    `folder` is that of MXNet's library. Returns the names that cannot be loaded, with the loader's reasons.
    """
    import ctypes  # here: the doctor imports this file also in a Python that was built without it

    missing = {}
    order = {name: index for index, name in enumerate(WHEELS)}  # in which they can be loaded; others come last
    for name in sorted(names, key=lambda name: order.get(name, len(order))):
        path = next(_places(name, folder), name)
        paths = [path]
        if "cudnn" in name and path != name:
            parts = (os.path.join(os.path.dirname(path), f"libcudnn_{part}.so.8") for part in _CUDNN_PARTS)
            paths += filter(os.path.exists, parts)
        for one in paths:
            try:
                ctypes.CDLL(one)
            except OSError as error:
                missing[os.path.basename(one)] = str(error)
    return missing


def _places(name: str, folder: Path) -> Iterator[str]:
    """Paths of a library: beside MXNet's, then in NVIDIA's wheels on ``sys.path``."""
    yield from glob.glob(os.path.join(glob.escape(str(folder)), name))
    for index in sys.path:
        yield from glob.glob(os.path.join(glob.escape(index), "nvidia", "*", "lib", name))


def from_wheels(name: str, folder: Path) -> bool:
    """Whether :func:`load` takes a library from one of NVIDIA's wheels."""
    path = next(_places(name, folder), None)
    return path is not None and Path(path).parent != Path(folder)


def nvrtc_version() -> int:
    """The CUDA version of NVRTC, which compiles fused operators, as 11080 for 11.8; 0 if it cannot be loaded."""
    import ctypes

    try:
        library = ctypes.CDLL("libnvrtc.so.11.2")
    except OSError:
        return 0
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return 1000 * major.value + 10 * minor.value
