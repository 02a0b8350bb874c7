"""Compilation of functions that run without Python's lock, and the C and Python functions that they call."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

import numba  # which takes a fifth of a second
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys
from numba.core.sigutils import normalize_signature
from numba.core.typing import Signature
from numba.extending import intrinsic

from ...compat import mx
from ...errors import LOG
from ..ending import keep_after_end

SECOND = 1_000_000_000  # nanoseconds
MONOTONIC, PROCESSOR = 1, 3  # clocks: CLOCK_MONOTONIC, CLOCK_THREAD_CPUTIME_ID

# All files with compiled functions, and with the records that they read. Numba's cache keeps a function together with
# those that it calls in other files, and does not notice when these change. So a hash of all these files is a part of
# each function's name, under which Numba keeps it.
_PACKAGE = Path(__file__).parents[2]
_KINDS = ("engine/compiled/*.py", "engine/ending.py", "engine/functions.py",
          "kvstore/exchange.py", "kvstore/compiled_*.py",
          "kvstore/flight_recorder/layout.py", "kvstore/flight_recorder/compiled_*.py",
          "kvstore/mpi/shared_memory/layout.py", "kvstore/mpi/shared_memory/compiled_*.py",
          "nn/sync_batch_norm/operator*.py", "nn/sync_batch_norm/rendezvous.py",
          "nn/sync_batch_norm/compiled/*.py")  # fmt: skip
SOURCES = [str(path.relative_to(_PACKAGE)) for kind in _KINDS for path in sorted(_PACKAGE.glob(kind))]
_VERSION = hashlib.sha256(b"".join((_PACKAGE / name).read_bytes() for name in SOURCES)).hexdigest()[:12]


_OPTIONS = {"error_model": "numpy"}  # of Numba


class _Kept(FunctionCache):
    """Numba's cache, without what Numba does before it looks there: load its whole compiler, which takes 0.3 s."""

    def load_overload(self, sig: Signature, target_context: Any) -> Any:
        """The compiled function, or None."""
        rtsys.initialize(target_context)  # what functions that make arrays are linked with
        found = self._load_overload(sig, target_context)
        if found is None:
            _say_that_it_compiles("it is kept on disk for later runs")
        return found


@functools.cache
def _say_that_it_compiles(rest: str) -> None:
    LOG.warning(
        "gluon_parallel: compiling what SyncBatchNorm and exchanges between processes need, which takes up to a minute "
        f"of one core; {rest}"
    )


def compile_all() -> None:
    """Load, or compile and keep, all functions of the package; otherwise each file's are at its import."""
    for name in SOURCES:
        if "compiled" in name and not name.endswith("__init__.py"):
            importlib.import_module(f"{__name__.partition('.')[0]}.{name[:-3].replace('/', '.')}")


class _Function(CPUDispatcher):
    """A function of compiled code or Python, of these signatures alone."""

    _can_compile: bool  # Numba's: whether `prepare` is still to be done

    def __init__(self, function: Callable[..., Any], signatures: Sequence[Signature], options: dict) -> None:
        super().__init__(function, {}, {"nopython": True, **options})
        self._wanted = signatures

    def prepare(self) -> None:
        """Load it, or compile it with all that it calls."""
        with global_compiler_lock:
            if self._can_compile:
                for signature in self._wanted:
                    self.compile(signature)
                self.disable_compile()

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """What Numba asks for when it compiles a call of this function."""
        self.prepare()
        return super().get_call_template(args, kws)

    def _compile_for_args(self, *args: Any, **_kws: Any) -> Any:
        """What Numba asks for when Python calls this function with types that it does not know: an address."""
        self.prepare()
        overloads: Any = self.overloads
        given = tuple(map(self.typeof_pyval, args))
        return overloads.get(given, next(iter(overloads.values()))).entry_point


def compiled(
    signature: Signature | list[Signature], called_from_python: bool = False, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for `signature`, or for each of a list, and keep the code on disk where that is possible.

    What only compiled code calls is a part of its callers' code: it is compiled with the first of them that is not on
    disk. Where Python is the caller, the function is loaded, or compiled, now.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        signatures = signature if isinstance(signature, list) else [signature]
        return _prepared(_Function(function, signatures, {**_OPTIONS, **options}), function, called_from_python)

    return decorate


def c_callback(signature: Signature, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function whose attribute `address` is that of a C function of this signature; the rest as above."""

    def decorate(function: Callable[..., Any]) -> Any:
        made = CFunc(function, normalize_signature(signature), {}, {**_OPTIONS, **options})
        return _prepared(made, function, True)

    return decorate


def _prepared(made: Any, function: Callable[..., Any], at_once: bool) -> Any:
    """What Numba has made of the function, with a cache on disk."""
    function.__qualname__ = f"{function.__qualname__}_{_VERSION}"
    try:
        made._cache = _Kept(function)
    except RuntimeError:  # what Numba raises without a folder that code may be kept in
        _say_that_it_compiles("no folder may keep it for later runs: set NUMBA_CACHE_DIR to one that can be written to")
    if at_once:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", numba.errors.NumbaWarning)  # a cache that cannot be written does no harm
            made.prepare() if isinstance(made, _Function) else made.compile()
    return made


def c_function(name: str, num_arguments: int) -> Callable[..., int]:
    """A C function of `num_arguments` words that returns an ``int``; found by its name when compiled code is loaded."""
    return types.ExternalFunction(name, types.int32(*[types.int64] * num_arguments))


def mxnet_function(name: str, num_arguments: int) -> Callable[..., int]:
    """:func:`c_function` for a function of MXNet's C API."""
    binding.add_symbol(name, ctypes.cast(getattr(mx.base._LIB, name), ctypes.c_void_p).value)
    return c_function(name, num_arguments)


def python_function(function: Callable[..., Any], *kinds: Any) -> Callable[..., int]:
    """:func:`c_function` for a Python function, which takes arguments of these ctypes and returns an ``int``.

    It should catch all exceptions. Ctrl-C may raise one before its first line, and then the result means nothing.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    called = keep_after_end(ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(function))
    binding.add_symbol(name, ctypes.cast(called, ctypes.c_void_p).value)
    return c_function(name, len(kinds))


def instruction(result: types.Type, *kinds: types.Type | None) -> Callable[[Callable[..., ir.Value]], Any]:
    """An operation for compiled code on arguments of the types `kinds`, None for any; the function emits it in LLVM."""

    def decorate(emit: Callable[..., ir.Value]) -> Any:
        def operation(_typing: Any, *arguments: types.Type) -> tuple[Signature, Callable[..., ir.Value]]:
            def code(_context: Any, builder: ir.IRBuilder, _signature: Signature, values: Sequence[ir.Value]) -> Any:
                return emit(builder, *values)

            return result(*(kind or given for kind, given in zip(kinds, arguments))), code

        return intrinsic(functools.wraps(emit)(operation))  # Numba counts the arguments after the first

    return decorate


@instruction(types.int32, *[types.int64] * 4)
def call(builder: ir.IRBuilder, function: ir.Value, first: ir.Value, second: ir.Value, third: ir.Value) -> ir.Value:
    """Call the C function at that address with three words; its result is an ``int``."""
    word = ir.IntType(64)
    kind = ir.FunctionType(ir.IntType(32), [word] * 3)
    return builder.call(builder.inttoptr(function, kind.as_pointer()), (first, second, third))


pthread_mutex_lock = c_function("pthread_mutex_lock", 1)
pthread_mutex_unlock = c_function("pthread_mutex_unlock", 1)
pthread_cond_broadcast = c_function("pthread_cond_broadcast", 1)
_pthread_cond_timedwait = c_function("pthread_cond_timedwait", 3)
_clock_gettime = c_function("clock_gettime", 2)


@compiled(types.int64(types.int64))
def now(clock: int) -> int:
    """Nanoseconds of a clock."""
    time = np.empty(2, np.int64)  # timespec: seconds, nanoseconds
    _clock_gettime(clock, time.ctypes.data)
    return time[0] * SECOND + time[1]


@compiled(types.int32(types.int64, types.int64, types.int64))
def wait_until(condition: int, mutex: int, end: int) -> int:
    """Wait for the condition until `end`, nanoseconds of its clock; returns 0, or ``ETIMEDOUT``."""
    time = np.empty(2, np.int64)  # timespec
    time[0], time[1] = end // SECOND, end % SECOND
    status = _pthread_cond_timedwait(condition, mutex, time.ctypes.data)
    time[0] = 0  # Numba frees an array after its last use, which must not come before the call
    return status
