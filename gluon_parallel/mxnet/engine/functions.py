"""Python functions in MXNet's engine: they run when the arrays that they read and write are ready.

:func:`push` queues a Python function like any operator: nobody waits for it, and who reads an array that it writes
gets the new value.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Callable, Protocol

from ...native import locked, new_mutex, provide_mxnet
from ...native.records import C
from ..compat import mx
from . import failures

_LIB = mx.base._LIB
provide_mxnet(_LIB)

_POINTERS = [ctypes.c_void_p] * 3
# What the engine calls with (run_context, on_complete, number of the pending call), until `on_complete` is called.
_CALLBACK = ctypes.CFUNCTYPE(None, *_POINTERS)
_FREED = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # what it calls with the number when it frees such a function
# What tells the engine that such a function has ended, with (engine, parameter, dmlc::Error or null); the second keeps
# Python's lock: a thread that leaves Python right after it need not wait for the lock again.
_ENDED, _ENDED_AT_ONCE = ctypes.CFUNCTYPE(None, *_POINTERS), ctypes.PYFUNCTYPE(None, *_POINTERS)

# MXNet's engine adds each exception to one list of all devices, in which other threads search at the same time, without
# a lock. So whoever ends a function with an exception, the C library too, holds this mutex, and `make_room` makes the
# list so large, before it is used, that no thread reads or frees memory that the list has left.
one_error_at_a_time = new_mutex()
_ROOM = 1 << 20  # exceptions between two calls of `waitall`; of the 16 MB, those are used that hold exceptions
_REFERENCE = 16  # bytes of one: a std::shared_ptr
has_room = False
_makes_room = threading.Lock()

# FnProperty of the engine.
_AT_ONCE = ctypes.c_int(4)  # kAsync: it never waits, so the thread that pushes it may run it
_ALWAYS = ctypes.c_int(7)  # kNoSkip: it runs although an array that it reads has failed


class Done(Protocol):
    """What a function of :func:`push_async` calls once, when it has ended."""

    def __call__(self, error: BaseException | None = None) -> None: ...


_numbers = itertools.count(1)
# number -> (function, the arrays, which must live until it has run, those that it writes)
pending: dict[int, tuple[Callable[..., object], list[mx.nd.NDArray], list[mx.nd.NDArray]]] = {}


@_FREED
def _forget(number: int) -> None:
    pending.pop(number, None)  # if it was not called, because one of its arrays had failed


@_CALLBACK
def _run(_run_context: int, on_complete: int, number: int) -> None:
    function, arrays, written = pending.pop(number)
    try:
        function()
        error = None
    except BaseException as raised:  # an exception cannot cross the engine's C++ frames
        error = raised
    del arrays
    _end(C.OnComplete.from_address(on_complete), error, written, _ENDED_AT_ONCE)


@_CALLBACK
def _start(_run_context: int, on_complete: int, number: int) -> None:
    function, arrays, written = pending.pop(number)
    ended, first_call = threading.Event(), threading.Lock()
    waiting = C.OnComplete.from_buffer_copy(C.OnComplete.from_address(on_complete))

    def done(error: BaseException | None = None) -> None:
        if not first_call.acquire(blocking=False):  # of two threads, one ends it: the engine would free it twice
            return
        ended.set()
        arrays.clear()
        _end(waiting, error, written, _ENDED)

    try:
        function(done)
    except BaseException as error:
        done(error)
    if _is_naive():  # it knows no function that ends later
        ended.wait()


def _end(waiting: Any, error: BaseException | None, written: list[mx.nd.NDArray], ended: Callable[[int], Any]) -> None:
    given = _given(error, written)
    written.clear()
    with locked(one_error_at_a_time) if given else contextlib.nullcontext():
        ended(waiting.callback)(waiting.engine, waiting.param, given)


def _is_naive() -> bool:
    return os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"


def _given(error: BaseException | None, written: Sequence[mx.nd.NDArray]) -> int | None:
    """What the engine is given for `error`: an address, which travels with the arrays `written`, or None."""
    if error is None:
        return None
    if not written or _is_naive():  # nothing can carry it: then the next call here raises it
        failures.remember(error)
        return None
    given = ctypes.addressof(failures.memory_of(error))
    fail(written[1:], error)  # the engine forgets what it was given for all arrays as soon as one of them is read
    return given


def fail(arrays: Iterable[mx.nd.NDArray], error: BaseException) -> None:
    """Queue that `arrays` have failed: waiting for any of them, or for what is computed from it, raises `error`.

    Whoever reads one of them afterwards without an error, because it was raised before, finds what was in it.
    """
    for array in arrays:  # without a check, whose error would leave `arrays` as they are
        _push(_start, lambda done: done(error), [], [array], None, "gluon_parallel.fail", 0, always=True)


@_CALLBACK
def _fail_at_once(_run_context: int, on_complete: int, given: int) -> None:
    waiting = C.OnComplete.from_address(on_complete)
    with locked(one_error_at_a_time):
        _ENDED_AT_ONCE(waiting.callback)(waiting.engine, waiting.param, given)


def make_room() -> None:
    """Have the engine's list of exceptions, which never shrinks, hold `_ROOM`: once, before its first use."""
    global has_room
    if has_room or _is_naive():
        return
    with _makes_room:
        if not has_room:
            _move_list()
            has_room = True


def _engine_words() -> ctypes.Array:
    """The memory of the engine's object, 8 bytes each."""
    get_engine, size_of = _LIB._ZN5mxnet6Engine3GetEv, ctypes.CDLL(None).malloc_usable_size  # mxnet::Engine::Get()
    get_engine.restype, size_of.argtypes, size_of.restype = ctypes.c_void_p, [ctypes.c_void_p], ctypes.c_size_t
    engine = get_engine()
    return (ctypes.c_size_t * (size_of(engine) // 8)).from_address(engine)


def _move_list() -> None:
    """Give the engine's list of exceptions other memory; it is found by how an exception changes the engine."""
    allocate = ctypes.CDLL("libstdc++.so.6")._Znwm  # operator new(size_t)
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    array, error = mx.nd.empty(1, mx.cpu(0)), RuntimeError("nobody sees this")
    *_, arguments = _operands([], [array])
    after = ctypes.byref(_AT_ONCE), ctypes.c_int(0), b"gluon_parallel.make_room", ctypes.c_bool(False)
    words = _engine_words()
    before = [*words]
    given = ctypes.byref(failures.memory_of(error))
    mx.base.check_call(_LIB.MXEnginePushAsyncND(_fail_at_once, given, None, *arguments, *after))
    for place in range(len(words) - 2):  # begin, end, and end of the memory of a std::vector
        begin, end, limit = words[place : place + 3]
        if 0 < begin < end <= limit and end - begin == before[place + 1] - before[place] + _REFERENCE:
            memory = allocate(_ROOM * _REFERENCE)
            ctypes.memmove(memory, begin, end - begin)  # what it leaves is not freed: another thread may read it
            words[place : place + 3] = [memory, memory + end - begin, memory + _ROOM * _REFERENCE]
            break
    with contextlib.suppress(RuntimeError):
        array.wait_to_read()
    failures.forget(error)


def push(
    function: Callable[[], object],
    read: Iterable[mx.nd.NDArray] = (),
    write: Iterable[mx.nd.NDArray] = (),
    device: mx.Context | None = None,
    name: str = "python",
    priority: int = 0,
) -> None:
    """Queue `function` to run when all operators before it are done with the arrays that it uses; do not wait.

    Args:
        function: called without arguments on an engine thread. It must not wait for the arrays named here (they are
            its own already) nor call MXNet operators on them; it works on their memory, see :func:`.array_memory.view`.
        read, write: the NDArrays that it reads, and those that it writes, or reads and writes; no two views of one
            memory, for which the engine would wait for ever. What `function` raises is raised where an array of
            `write` is waited for, and so is what had happened to the arrays before: then `function` is not called.
            Without `write` it is always called, and the next function of this module raises its exception.
        device: the device whose worker runs it; by default the CPU device of the first array.
        name: shown by MXNet's profiler.
        priority: a higher one starts earlier among functions that are ready.

    Raises:
        Exception: what an earlier function that writes to no array raised.
    """
    failures.check()
    _push(_run, function, read, write, device, name, priority)


def push_async(
    function: Callable[[Done], object],
    read: Iterable[mx.nd.NDArray] = (),
    write: Iterable[mx.nd.NDArray] = (),
    device: mx.Context | None = None,
    name: str = "python",
    priority: int = 0,
) -> None:
    """:func:`push` of a `function` that begins when its arrays are ready and ends later, elsewhere; no thread waits.

    Args:
        function: called with one argument on an engine thread: ``done``, to be called once, from any thread, when the
            arrays may be used again. ``done(error)`` ends it with an exception, as if `function` had raised it. Join a
            thread of yours that calls it before Python ends, see :func:`.ending.at_exit_after_engine`.
        read, write, device, name, priority: as for :func:`push`.
    """
    failures.check()
    _push(_start, function, read, write, device, name, priority)


def _push(
    callback: Callable[..., None],
    function: Callable[..., object],
    read: Iterable[mx.nd.NDArray],
    write: Iterable[mx.nd.NDArray],
    device: mx.Context | None,
    name: str,
    priority: int,
    always: bool = False,
) -> None:
    make_room()
    read, write, arguments = _operands(read, write, device)
    number = next(_numbers)
    pending[number] = (function, [*read, *write], write)
    is_called = always or not write  # whatever has failed
    status = _LIB.MXEnginePushAsyncND(
        callback,
        ctypes.c_void_p(number),
        None if is_called else _forget,
        *arguments,
        ctypes.byref(_ALWAYS) if is_called else None,
        ctypes.c_int(priority),
        name.encode(),
        ctypes.c_bool(False),  # do not wait for the function's end
    )
    if status != 0:
        pending.pop(number, None)
        mx.base.check_call(status)
    if _is_naive():  # it has run already
        failures.check()


def without_repetition(
    read: Iterable[mx.nd.NDArray], write: Iterable[mx.nd.NDArray]
) -> tuple[list[mx.nd.NDArray], list[mx.nd.NDArray]]:
    """The arrays that are only read, and those that are written; the engine refuses one that is named twice."""
    written = {id(array): array for array in write}
    return list({id(array): array for array in read if id(array) not in written}.values()), list(written.values())


def _operands(
    read: Iterable[mx.nd.NDArray], write: Iterable[mx.nd.NDArray], device: mx.Context | None = None
) -> tuple[list[mx.nd.NDArray], list[mx.nd.NDArray], list[Any]]:
    """The arrays that a function only reads, those that it writes, and both and the device as the engine takes them."""
    read, write = without_repetition(read, write)
    if device is None:
        device = next((array.ctx for array in (*write, *read)), mx.cpu(0))
    context = (ctypes.c_int * 2)(device.device_typeid, device.device_id)  # the memory of a ``mxnet::Context``
    arguments: list = [ctypes.byref(context)]
    for arrays in (read, write):
        arguments += (ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays)), ctypes.c_int(len(arrays))
    return read, write, arguments


# A C function that ignores the engine's arguments and does nothing to memory.
_NOTHING = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p)


def order(first: Sequence[mx.nd.NDArray], then: Sequence[mx.nd.NDArray]) -> None:
    """Queue nothing but an order: operators that use an array of `then` from now on wait for all of `first`.

    Where an array of `first` has failed, those of `then` have too. No two of them share their memory.
    """
    if first and then:
        _push_nothing(first, then, "gluon_parallel.order")


def mark(arrays: Iterable[mx.nd.NDArray], name: str) -> None:
    """Queue nothing but a name, which MXNet's profiler shows on the one device of `arrays` when they are ready."""
    _push_nothing(arrays, [], name)


def _push_nothing(read: Iterable[mx.nd.NDArray], written: Iterable[mx.nd.NDArray], name: str) -> None:
    *_, arguments = _operands(read, written)
    status = _LIB.MXEnginePushSyncND(
        _NOTHING, None, None, *arguments, ctypes.byref(_AT_ONCE), ctypes.c_int(0), name.encode()
    )
    mx.base.check_call(status)


class Call:
    """A C function and its arrays, to be pushed again and again at the cost of one call into MXNet.

    Args:
        function: address of a C function of (run context, on_complete, argument): it copies the three words at
            `on_complete`, a function and its first two arguments, and has that function called with them and null, or
            the pointer of :func:`.failures.memory_of`, when the arrays may be used again.
        argument: a number for it.
        read, write, name: as for :func:`push`. They are kept alive as long as this object.
        always: a worker of the engine calls the function also where one of the arrays has failed; they stay failed.
        at_once: whether it is so short that the thread that pushes may call it; else a worker of the engine does.
    """

    def __init__(
        self,
        function: int,
        argument: int,
        read: Iterable[mx.nd.NDArray],
        write: Iterable[mx.nd.NDArray],
        name: str,
        always: bool = False,
        at_once: bool = True,
    ) -> None:
        make_room()
        read, write, arguments = _operands(read, write)
        self._arrays = [*read, *write]
        which = ctypes.byref(_ALWAYS if always else _AT_ONCE) if always or at_once else None
        self._before = (ctypes.c_void_p(function), ctypes.c_void_p(argument), None, *arguments, which)
        self._after = name.encode(), ctypes.c_bool(False)

    def push(self, priority: int = 0) -> None:
        """Queue the function; do not wait. Raises what :func:`push` does."""
        if failures.kept:
            failures.check()
        mx.base.check_call(_LIB.MXEnginePushAsyncND(*self._before, ctypes.c_int(priority), *self._after))


def settle() -> list[BaseException]:
    """Wait for all that is queued, and return the exceptions of pushed functions that nobody has seen.

    Raises:
        MXNetError: an operator of MXNet's failed, and nobody has waited for its result.
    """
    status = _LIB.MXNDArrayWaitAll()
    if status != 0 and not failures.is_ours(mx.base.py_str(_LIB.MXGetLastError())):
        mx.base.check_call(status)
    return failures.take_unreported()
