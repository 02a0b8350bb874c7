"""A Python function runs inside MXNet's engine, when the arrays that it reads and writes are ready.

MXNet executes asynchronously: an operator call returns at once, and a scheduler runs it when its inputs are there.
:func:`push` puts a Python function into that queue like any operator. It starts while the backward pass is still
running elsewhere, nobody waits for it, and whoever reads an array that it writes gets the new value.
"""

import atexit
import contextlib
import ctypes
import itertools
import os
import sys
import threading

import numpy as np

from .compat import mx
from .errors import DeviceNotLaunched

_LIB = mx.base._LIB

# void (*)(void* run_context, void* param): what the engine calls; `param` is the number of the pending call.
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


# void (*)(void* run_context, void* on_complete, void* param): the same for a function that ends later.
_START = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
# void (*)(Engine* engine, void* param, const dmlc::Error* error): what tells the engine that such a function has ended.
_ENDED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class _OnComplete(ctypes.Structure):
    """The memory layout of the engine's ``CallbackOnComplete``."""

    _fields_ = [("callback", ctypes.c_void_p), ("engine", ctypes.c_void_p), ("param", ctypes.c_void_p)]


_AT_ONCE = ctypes.c_int(4)  # FnProperty::kAsync: it never waits, so whoever pushes it may run it


class _Context(ctypes.Structure):
    """The memory layout of a ``mxnet::Context``."""

    _fields_ = [("device_type", ctypes.c_int), ("device_id", ctypes.c_int)]


_numbers = itertools.count(1)
_pending: dict = {}  # number -> (function, the arrays, which must live until it has run)
_failures: list = []
_lock = threading.Lock()


@_CALLBACK
def _run(_run_context, number):
    function, _arrays = _pending.pop(number)
    try:
        function()
    except BaseException as error:  # an exception cannot cross the engine's C++ frames: keep it for the next call
        remember(error)


@_START
def _start(_run_context, on_complete, number):
    function, arrays = _pending.pop(number)
    ended = threading.Event()
    waiting = _OnComplete.from_buffer_copy(_OnComplete.from_address(on_complete))

    def done(error=None):
        if ended.is_set():
            return
        ended.set()
        arrays.clear()
        remember(error)
        _ENDED(waiting.callback)(waiting.engine, waiting.param, None)

    try:
        function(done)
    except BaseException as error:
        done(error)
    if os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":  # it knows no function that ends later
        ended.wait()


def remember(error):
    """Keep `error` for :func:`check`, once, however many functions it ended."""
    with _lock:
        if error is not None and not any(error is known for known in _failures):
            _failures.append(error)


def check():
    """Raise the first exception that a pushed function raised since the last check, if any."""
    with _lock:
        if not _failures:
            return
        error = _failures.pop(0)
    raise error


def push(function, read=(), write=(), device=None, name="python", priority=0):
    """Queue `function` to run when all operators before it are done with the arrays that it uses; do not wait.

    Args:
        function: called without arguments on an engine thread. It must not wait for the arrays named here (they are
            its own already) nor call MXNet operators on them; it works on their memory, see :func:`view`.
        read, write: the NDArrays that it reads, and those that it writes; an array named in `write` may be read too.
            Two views of one memory count as two arrays here but as one for the engine, which would wait for ever.
        device: the device whose worker runs it; by default the CPU device of the first array.
        name: shown by MXNet's profiler.
        priority: a higher one starts earlier among functions that are ready.

    Raises:
        Exception: whatever an earlier pushed function raised (the engine cannot raise it where it happened).
    """
    _push(_LIB.MXEnginePushSyncND, _run, function, read, write, device, name, priority)


def push_async(function, read=(), write=(), device=None, name="python", priority=0):
    """Queue a `function` that begins when its arrays are ready and ends later, elsewhere; no engine thread waits.

    Args:
        function: called with one argument on an engine thread: ``done``, to be called once, from any thread, when the
            arrays may be used again. ``done(error)`` ends it with an exception, which the next :func:`push` raises.
        read, write, device, name, priority: as for :func:`push`.

    Raises:
        Exception: whatever an earlier pushed function raised.
    """
    wait = ctypes.c_bool(False)  # not for the function's end
    _push(_LIB.MXEnginePushAsyncND, _start, function, read, write, device, name, priority, wait)


def _push(c_function, callback, function, read, write, device, name, priority, *more):
    check()
    write = list({id(array): array for array in write}.values())  # the engine refuses an array named twice
    written = {id(array) for array in write}
    read = list({id(array): array for array in read if id(array) not in written}.values())
    if device is None:
        device = next((array.context for array in (*write, *read)), mx.cpu(0))
    number = next(_numbers)
    _pending[number] = (function, [*read, *write])
    status = c_function(
        callback,
        ctypes.c_void_p(number),
        None,
        ctypes.byref(_Context(device.device_typeid, device.device_id)),
        (ctypes.c_void_p * len(read))(*(array.handle for array in read)),
        ctypes.c_int(len(read)),
        (ctypes.c_void_p * len(write))(*(array.handle for array in write)),
        ctypes.c_int(len(write)),
        None,
        ctypes.c_int(priority),
        name.encode(),
        *more,
    )
    if status != 0:
        _pending.pop(number, None)
        mx.base.check_call(status)


class Call:
    """A compiled function and its arrays, to be pushed again and again at the cost of one call into MXNet.

    Args:
        function: address of a C function of (run context, on_complete, argument), which ends as :func:`push_async`
            says: it copies the three words at `on_complete`, a function and its first two arguments, and has that
            function called with them and a null pointer when the arrays may be used again. Where the arrays are
            ready it is called at once, by the thread that pushes.
        argument: a number for it.
        read, write, name: as for :func:`push`. They are kept alive as long as this object.
    """

    def __init__(self, function, argument, read, write, name):
        write = list({id(array): array for array in write}.values())
        written = {id(array) for array in write}
        read = list({id(array): array for array in read if id(array) not in written}.values())
        device = (write or read)[0].context
        self._arrays = [*read, *write]
        self._device = _Context(device.device_typeid, device.device_id)
        self._before = (
            ctypes.c_void_p(function), ctypes.c_void_p(argument), None, ctypes.byref(self._device),
            (ctypes.c_void_p * len(read))(*(array.handle for array in read)), ctypes.c_int(len(read)),
            (ctypes.c_void_p * len(write))(*(array.handle for array in write)), ctypes.c_int(len(write)),
            ctypes.byref(_AT_ONCE),
        )  # fmt: skip
        self._after = name.encode(), ctypes.c_bool(False)

    def push(self, priority=0):
        """Queue the function; do not wait.

        Raises:
            Exception: whatever an earlier pushed function raised.
        """
        check()
        mx.base.check_call(_LIB.MXEnginePushAsyncND(*self._before, ctypes.c_int(priority), *self._after))


def view(array):
    """The memory of a dense CPU array as a NumPy array, without a copy.

    Only inside a function that was pushed with `array`, or after ``array.wait_to_read()``; and only for an array in
    the plain layout: gradient buffers always are, others after :func:`make_plain`.
    """
    pointer = ctypes.c_void_p()
    mx.base.check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    dtype = np.dtype(array.dtype)
    if array.size == 0:
        return np.empty(array.shape, dtype)
    memory = (ctypes.c_char * (array.size * dtype.itemsize)).from_address(pointer.value)
    return np.frombuffer(memory, dtype).reshape(array.shape)


def make_plain(array):
    """Queue an operator after which `array`, a dense CPU array, is in the plain (row-major) memory layout.

    What a convolution returns lies in oneDNN's blocked layout, and asking for its memory inside the engine would wait
    for ever. MXNet's reshape is the one operator that reorders in place; on an array that is plain it does nothing.
    """
    if array.ndim > 1 and array.size:
        with mx.autograd.pause():
            mx.nd.reshape(array, shape=array.shape, out=array)


def _finish():
    """Before the interpreter goes: let queued functions run while Python still can, and report what failed unseen."""
    with contextlib.suppress(DeviceNotLaunched):  # an exception has ended the program in the middle of a step
        mx.nd.waitall()
    for error in _failures:
        print(f"gluon_parallel: a function in MXNet's engine failed: {error!r}", file=sys.stderr)


atexit.register(_finish)

# fork() holds the GIL while MXNet's own fork handler waits for its workers, and one of those may need the GIL to run a
# function of ours: let them finish first. Python 3.9's subprocess forks likewise, without asking these hooks.
os.register_at_fork(before=mx.nd.waitall)
if sys.version_info < (3, 10):
    sys.addaudithook(lambda event, _arguments: mx.nd.waitall() if event == "subprocess.Popen" else None)
