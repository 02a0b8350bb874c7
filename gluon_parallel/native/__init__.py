"""The package's C library, which `build.py` builds from the C files of this folder: its functions, by their names."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from .build import NAME, NATIVE, sources
from .records import C, address_of

if TYPE_CHECKING:
    import numpy as np

_T = TypeVar("_T")

_REMEDY = (
    "run `make venv` in the checkout; in an environment of your own, `python gluon_parallel/native/build.py`"
    if (NATIVE.parents[1] / "Makefile").exists()
    else "install gluon_parallel again on this machine, e.g. `pip install --force-reinstall --no-deps .` in a checkout"
)
# Settings of Open MPI 5.0 for processes that go on without lost ones. Without them, others wait for ever, or crash,
# when a process is lost while large arrays are on their way over TCP.
_SETTINGS = {
    # Where several threads may call it, Open MPI notes the end of a connection while it holds that connection's lock,
    # and may then send there, which needs the lock. The store calls it from one thread at a time.
    "MPI4PY_RC_THREAD_LEVEL": "serialized",
    # The flags of TCP but "put", by which a receiver asks for the parts of an array. A request that could not ask a
    # lost process is freed, and yet stays in the list of those that ask later.
    "OMPI_MCA_btl_tcp_flags": "send,inplace,need-ack,need-csum,hetero-rdma",
}


@functools.cache
def library() -> ctypes.CDLL:
    """The library, which stays loaded to the end of the process: ctypes closes none, and MXNet's threads may be in it.

    Raises:
        ImportError: the file is missing, for another processor or system, or built from other C files than are here.
    """
    path = NATIVE / NAME
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"The C library cannot be loaded here ({error}): {_REMEDY}") from None
    built_from = loaded.gluon_parallel_sources
    built_from.restype = ctypes.c_char_p
    if built_from().decode().split()[0] != sources():
        raise ImportError(f"The C library {path} was built from other C files than are here: {_REMEDY}")
    if loaded.gp_processor() < 0:
        names = ("baseline", "avx2", "avx512")[: loaded.gp_best_processor() + 1]
        given = os.environ["GLUON_PARALLEL_PROCESSOR"]
        raise ImportError(f"GLUON_PARALLEL_PROCESSOR is {given!r}, this machine has: {', '.join(names)}")
    return loaded


def address(name: str) -> int:
    """The address of the C function of that name."""
    return ctypes.addressof(ctypes.c_char.in_dll(library(), name))


@functools.cache
def function(name: str, num_arguments: int, keeps_lock: bool = False) -> Callable[..., int]:
    """The C function as a Python function of so many ``int``, which returns one where the C function does.

    Python's lock is given up during the call, unless it is so short that it `keeps_lock`.
    """
    kind = ctypes.PYFUNCTYPE if keeps_lock else ctypes.CFUNCTYPE
    return kind(ctypes.c_int64, *[ctypes.c_int64] * num_arguments)(address(name))


def provide(name: str, function: Callable[..., Any], *kinds: Any) -> None:
    """Have the library call this Python function, with arguments of these ctypes, as the `name` of ``External``.

    The function should catch all exceptions. Ctrl-C may raise one before its first line, and then the result means
    nothing.
    """
    _set(name, keep_after_end(ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(function)))


def provide_mxnet(mxnet: ctypes.CDLL) -> None:
    """Have the library call MXNet's functions in this library."""
    for name, _ in C.External._fields_:
        if name.startswith("MX"):
            _set(name, getattr(mxnet, name))


@functools.cache
def _repair_open_mpi() -> None:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    library()
    ctypes.CDLL(str(NATIVE / NAME), mode=os.RTLD_GLOBAL | os.RTLD_NOLOAD)


def repair_open_mpi() -> bool:
    """Have Open MPI outlive the loss of other processes; returns whether it does: not where it runs already without.

    It gets settings, where the user has made none, and calls the functions of ``open_mpi.c`` in the place of its own.
    """
    if "mpi4py.MPI" in sys.modules and not _repair_open_mpi.cache_info().currsize:
        return False
    _repair_open_mpi()
    return True


def _set(name: str, pointer: Any) -> None:
    setattr(C.External.in_dll(library(), "gp_external"), name, ctypes.cast(pointer, ctypes.c_void_p).value)


def keep_after_end(something: _T) -> _T:
    """Return the object with a reference that is never given back: MXNet's threads may use it after Python's end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(something))
    return something


@contextlib.contextmanager
def ends_within(seconds: float, said: str) -> Iterator[None]:
    """End the process with status 1, and this on standard error, if the block takes longer, whatever it waits for."""
    text = ctypes.create_string_buffer(said.encode() + b"\n")
    end_within = function("gp_end_within", 2)
    end_within(max(1, int(seconds * 1000)), ctypes.addressof(text))
    try:
        yield
    finally:
        end_within(0, 0)


def new_mutex() -> np.ndarray:
    """(64,) bytes that hold a recursive mutex of pthreads, which Python and the C library can hold."""
    import numpy as np  # here: the library loads without it

    memory = np.zeros(64, np.uint8)
    function("gp_make_mutex", 1)(address_of(memory))
    return memory


@contextlib.contextmanager
def locked(mutex: np.ndarray) -> Iterator[None]:
    """Hold the mutex; Python's lock is not held while waiting for it, and Ctrl-C ends the wait."""
    address, lock, unlock = address_of(mutex), function("gp_lock", 1), function("gp_unlock", 1)
    try:  # before the wait: Ctrl-C may come when the mutex is held already; to unlock one that is not held is no harm
        while lock(address):
            pass
        yield
    finally:
        unlock(address)  # one call: Ctrl-C may come between two


@contextlib.contextmanager
def unlocked(mutex: np.ndarray) -> Iterator[None]:
    """Let go of a mutex that this thread holds once, within the block."""
    address, lock, unlock = address_of(mutex), function("gp_lock", 1), function("gp_unlock", 1)
    unlock(address)
    try:
        yield
    finally:
        while lock(address):
            pass
