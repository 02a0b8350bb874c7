"""CUDA-aware MPI: whether all processes have one, and the array size from which it is used."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

import numpy as np

from ....devices import num_gpus
from .device_memory import cuda_runtime

if TYPE_CHECKING:
    from ..progress_engine import ProgressEngine

SWITCH = "GLUON_PARALLEL_CUDA_AWARE"  # 0: stage everything through host memory; 1: MPI is CUDA-aware, do not ask it
LEAST = "GLUON_PARALLEL_CUDA_AWARE_FROM"  # bytes
_LEAST = 1 << 20  # not measured on a GPU: a guess at where copies cost what the operators cost that replace them
_CUDA = 0  # MPICH's number for that kind of GPU
# Libraries that have no function to ask, and what switches it on there.
_VARIABLES = {"MVAPICH2": "MV2_USE_CUDA", "CRAY MPICH": "MPICH_GPU_SUPPORT_ENABLED"}


def agreed(progress: ProgressEngine) -> int | None:
    """The bytes from which on arrays are handed to MPI where they are, or None for never; collective.

    It is the same everywhere: one process whose MPI cannot do it keeps all from it, and the largest size counts.

    Raises:
        ValueError: one of the two variables makes no sense.
    """
    mine = _least() if able() else -1
    if progress.size == 1:
        return None
    everyone = progress.gather(b"cuda_aware:from", b"", np.array([mine]))
    return int(everyone.max()) if (everyone >= 0).all() else None


def able() -> bool:
    """Whether this process can hand the memory of its devices to MPI.

    Without a GPU it can if it was told so: the addresses of host memory are as good. It is how tests take this way.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    said = os.environ.get(SWITCH)
    if said not in (None, "0", "1"):
        raise ValueError(f"{SWITCH}={said!r}: expected 0 (through host memory) or 1 (MPI takes the memory of GPUs)")
    if said == "0":
        return False
    gpu = num_gpus() > 0
    if gpu and cuda_runtime() is None:
        return False  # nobody could tell MPI's threads which GPU is meant
    return said == "1" or (gpu and mpi_is_cuda_aware())


def mpi_is_cuda_aware() -> bool:
    """What the MPI library in use says; MPI must have started.

    Open MPI has ``MPIX_Query_cuda_support``, MPICH from 4.0 on and what is built on it ``MPIX_GPU_query_support`` as
    well, which is asked first: one version of MPICH's other function asserts that the question has failed, and ends
    the program where it is compiled with assertions. Older relatives of MPICH have a variable instead.
    """
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)  # what is looked up here is looked up in the MPI that it is linked to
    if hasattr(library, "MPIX_GPU_query_support"):
        answer = ctypes.c_int(0)
        return library.MPIX_GPU_query_support(_CUDA, ctypes.byref(answer)) == MPI.SUCCESS and answer.value != 0
    if hasattr(library, "MPIX_Query_cuda_support"):
        return library.MPIX_Query_cuda_support() != 0
    version = MPI.Get_library_version().upper()
    return any(name in version and os.environ.get(variable) == "1" for name, variable in _VARIABLES.items())


def _least() -> int:
    text = os.environ.get(LEAST, str(_LEAST))
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise ValueError(f"{LEAST}={text!r}: expected a number of bytes, as in {LEAST}={_LEAST}")
    return int(text)
