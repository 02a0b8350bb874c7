"""Libraries of compiled functions: made by Numba when first needed, kept on disk, and loaded without Numba."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import mmap
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, TypeVar

from ...compat import mx
from ...errors import LOG
from ..ending import keep_after_end

_T = TypeVar("_T")

# Files with compiled functions, or with records that they use. A function's code includes the functions that it calls
# in other files, so the hash of all these files is part of every file name on disk.
_PACKAGE = Path(__file__).parents[2]
_KINDS = ("engine/compiled/*.py", "engine/ending.py", "engine/functions.py",
          "kvstore/exchange.py", "kvstore/compiled_*.py",
          "kvstore/flight_recorder/layout.py", "kvstore/flight_recorder/compiled_*.py",
          "kvstore/mpi/shared_memory/layout.py", "kvstore/mpi/shared_memory/compiled_*.py",
          "nn/sync_batch_norm/operator*.py", "nn/sync_batch_norm/rendezvous.py",
          "nn/sync_batch_norm/compiled/*.py")  # fmt: skip
SOURCES = [str(path.relative_to(_PACKAGE)) for kind in _KINDS for path in sorted(_PACKAGE.glob(kind))]


def _hash_of_sources() -> bytes:
    return hashlib.sha256(b"".join((_PACKAGE / name).read_bytes() for name in SOURCES)).digest()


_HASH = _hash_of_sources()  # now: the files may change while this process runs, and it has their records of now
_ROOT = __name__.partition(".")[0]
MODULES = [f"{_ROOT}.{name}" for name in (
    "kvstore.compiled_combine", "kvstore.flight_recorder.compiled_exchange",
    "kvstore.mpi.shared_memory.compiled_driver", "kvstore.mpi.shared_memory.compiled_gather",
    "nn.sync_batch_norm.compiled.kernels", "nn.sync_batch_norm.compiled.operators",
    "nn.sync_batch_norm.compiled.passes", "nn.sync_batch_norm.compiled.description",
)]  # fmt: skip

_WAIT = 300.0  # seconds for another process that compiles; then this one does it itself
_QUIET = 5.0  # of these, seconds before a line says so
_loading = threading.RLock()


def once(function: Callable[[], _T]) -> Callable[[], _T]:
    """A function whose result is made once and kept, also if several threads call it at the same time."""
    kept = functools.cache(function)

    @functools.wraps(function)
    def result() -> _T:
        with _loading:
            return kept()

    return result


class Library:
    """The C functions of a module, which :mod:`.functions` compiles.

    Args:
        module: its full name; one of the package is listed in `MODULES`.
        given: results of :func:`python_function`, by the names by which the code calls them.

    Example:
        >>> moments = Library("gluon_parallel.kvstore.compiled_combine")
        >>> moments.address("moments_operation") != moments.address("sums_operation")
        True
    """

    def __init__(self, module: str, **given: Any) -> None:
        self._module = module
        with _loading:
            names, code = object_code(module)
            binding = llvm()
            for name in names:
                if name in given or name.startswith("MX"):
                    function = given[name] if name in given else getattr(mx.base._LIB, name)
                    binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
                elif not hasattr(ctypes.CDLL(None), name):
                    raise ImportError(f"{module}: no C function {name!r}, which its compiled code calls")
            self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target_machine())
            self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
            self._engine.finalize_object()
        keep_after_end(self)  # MXNet's threads may be in it

    def address(self, name: str) -> int:
        """The address of the C function of that name."""
        found = self._engine.get_function_address(SYMBOL + name)
        assert found, f"{self._module} compiles no C function {name!r}"
        return found

    def function(self, name: str, num_arguments: int, keeps_lock: bool = False) -> Callable[..., int]:
        """The C function as a Python function of so many ``int``, which returns one where the C function does.

        Python's lock is given up during the call, unless it is so short that it `keeps_lock`.
        """
        kind = ctypes.PYFUNCTYPE if keeps_lock else ctypes.CFUNCTYPE
        return kind(ctypes.c_int64, *[ctypes.c_int64] * num_arguments)(self.address(name))


SYMBOL = f"{_ROOT}."  # before the names of a library's functions in object code


def python_function(function: Callable[..., Any], *kinds: Any) -> Any:
    """A C function that calls a Python function with arguments of these ctypes, and returns its ``int``.

    The function should catch all exceptions. Ctrl-C may raise one before its first line, and then the result means
    nothing.
    """
    return keep_after_end(ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(function))


@functools.cache
def llvm() -> Any:
    """LLVM's functions. The import takes 40 MB, so it is done at the first use."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding


@functools.cache
def _processor() -> dict[str, str]:
    return {"cpu": llvm().get_host_cpu_name(), "features": llvm().get_host_cpu_features().flatten()}


def target_machine() -> Any:
    """A new code generator of LLVM for this processor. Each library needs its own, because its engine deletes it."""
    target = llvm().Target.from_default_triple()
    reloc = "static" if target.name.startswith("x86") else "default"  # what LLVM's loader of object code can do
    return target.create_target_machine(**_processor(), opt=3, reloc=reloc, codemodel="jitdefault", jit=True)


@functools.cache
def _folders() -> list[Path]:
    """Where compiled code may be."""
    own, user = os.environ.get("GLUON_PARALLEL_COMPILED"), os.path.expanduser("~/.gluon_parallel/compiled")
    if own:
        return [Path(own).resolve()]
    return [_PACKAGE / "__pycache__", *([Path(user)] if os.path.isabs(user) else [])]  # a user may have no home


@functools.cache
def folder() -> Path | None:
    """Where this process keeps compiled code, or None where it can write to no folder."""
    for path in _folders():
        with contextlib.suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
            if os.access(path, os.W_OK):
                return path
    return None


def file_name(module: str) -> str:
    """File name of a module's object code; it differs for other sources, processors and versions of Numba."""
    source = importlib.util.find_spec(module).origin  # type: ignore[union-attr]
    kind = [*_processor().values(), importlib.metadata.version("numba"), str(mmap.PAGESIZE)]
    parts = _HASH, Path(source or "").read_bytes(), " ".join(kind).encode()
    return f"{module}-{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}.o"


def object_code(module: str) -> tuple[list[str], bytes]:
    """A module's object code, and the C functions that it calls: from disk, or compiled and kept there."""
    name, kept = file_name(module), folder()
    found = _find(name)
    if found is None and kept is None:
        _say_that_it_compiles("no folder may keep it for later runs: set GLUON_PARALLEL_COMPILED to one that can be "
                              "written to")  # fmt: skip
        return _compile(module)
    if found is None and kept is not None:
        with _alone(kept / "compiling.lock"):
            found = _read(kept / name)
            if found is None:
                _say_that_it_compiles("it is kept on disk for later runs")
                found = _compile(module)
                if _hash_of_sources() == _HASH:
                    _write(kept / name, *found)
    assert found
    return found


def is_kept(module: str) -> bool:
    """Whether the module's object code is on disk."""
    return _find(file_name(module)) is not None


def _find(name: str) -> tuple[list[str], bytes] | None:
    return next(filter(None, (_read(path / name) for path in _folders())), None)


def compile_all() -> None:
    """Compile and keep what is not on disk of the package's libraries; otherwise each is compiled when first needed."""
    for module in MODULES:
        object_code(module)


def _compile(module: str) -> tuple[list[str], bytes]:
    from .functions import compile_module  # here: for Numba, half a second

    with _loading:
        return compile_module(module)


@functools.cache
def _say_that_it_compiles(rest: str) -> None:
    LOG.warning(
        "gluon_parallel: compiling what SyncBatchNorm and exchanges between processes need, which takes up to a minute "
        f"of one core; {rest}"
    )


def _read(path: Path) -> tuple[list[str], bytes] | None:
    """What was written there; None if it cannot be read, or was damaged."""
    try:
        digest, _, rest = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    names, _, code = rest.partition(b"\n")
    return (names.decode().split(), code) if digest == hashlib.sha256(rest).hexdigest().encode() else None


def _write(path: Path, names: list[str], code: bytes) -> None:
    new, rest = path.with_name(f"{path.name}.{uuid.uuid4().hex}"), " ".join(names).encode() + b"\n" + code
    try:
        new.write_bytes(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
        new.replace(path)
    except OSError as error:  # the disk is full, for example
        LOG.warning(f"gluon_parallel: compiled code cannot be kept on disk: {error}")
        with contextlib.suppress(OSError):
            new.unlink()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock of this file, so that one process compiles at a time; after `_WAIT` seconds go on without it."""
    begin, said = time.monotonic(), False
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # another user's file, or a file system without locks
            file = stack.enter_context(open(path, "a"))
            while not _locked(file) and time.monotonic() < begin + _WAIT:
                if not said and time.monotonic() > begin + _QUIET:
                    said = True
                    LOG.warning(f"gluon_parallel: waiting for another process, which compiles and has locked {path}")
                time.sleep(0.05)
        yield


def _locked(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
