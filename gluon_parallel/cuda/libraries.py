"""The CUDA libraries that MXNet's library asks for: found in NVIDIA's wheels and loaded by path."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import elf
from .wheels import WHEELS

_CUDA = re.compile(r"lib(cuda|cudart|cublas|cublasLt|cudnn|nccl|cufft|curand|cusolver|cusparse|nvrtc|nvToolsExt)\.so")
# cuDNN loads them when it needs them, and would take those on LD_LIBRARY_PATH, which may be of another version.
_CUDNN_PARTS = ("ops_infer", "ops_train", "cnn_infer", "cnn_train", "adv_infer", "adv_train")


def needed(library: os.PathLike) -> list[str]:
    """The libraries of CUDA that a library asks for, the driver's included; none for a build for CPUs.

    Raises:
        OSError, ValueError: see :class:`elf.Library`.
    """
    with elf.Library(library) as opened:
        return [name for name in opened.needed() if _CUDA.match(name)]


def load(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Load libraries, so that MXNet's finds them wherever they are: the loader takes what has been loaded by name.

    What lies beside MXNet's library comes first, then NVIDIA's wheels in this Python, then where the loader itself
    looks (``LD_LIBRARY_PATH``, the system).

    Args:
        folder: of MXNet's library.
        names: of libraries.

    Returns:
        Those that cannot be loaded, with the loader's reasons.
    """
    import ctypes  # here: the doctor imports this file, also where Python has none

    missing = {}
    for name in sorted(names, key=lambda name: [*WHEELS, name].index(name)):
        path = next(_places(name, folder), name)
        parts = [os.path.join(os.path.dirname(path), f"libcudnn_{part}.so.8") for part in _CUDNN_PARTS]
        for one in [path, *(part for part in parts if "cudnn" in name and os.path.exists(part))]:
            try:
                ctypes.CDLL(one)
            except OSError as error:
                missing[os.path.basename(one)] = str(error)
    return missing


def _places(name: str, folder: Path) -> Iterator[str]:
    """Where a library lies beside MXNet's, or in a wheel of NVIDIA's, where the loader does not look."""
    yield from glob.glob(os.path.join(glob.escape(str(folder)), name))
    for place in sys.path:
        yield from glob.glob(os.path.join(glob.escape(place), "nvidia", "*", "lib", name))


def from_wheels(name: str, folder: Path) -> bool:
    """Whether :func:`load` takes a library from such a wheel."""
    return f"{os.sep}nvidia{os.sep}" in next(_places(name, folder), "")


def nvrtc_version() -> int:
    """The CUDA version of the compiler for fused operators, as 11080 for 11.8, once it is loaded; 0 without one."""
    import ctypes

    try:
        library = ctypes.CDLL("libnvrtc.so.11.2")
    except OSError:
        return 0
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return 1000 * major.value + 10 * minor.value
