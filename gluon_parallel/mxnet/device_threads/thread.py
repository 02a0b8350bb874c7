"""A persistent thread per device, from which the device's operators are launched, and :func:`parallel_apply`.

MXNet's temporary buffers and random generators belong to the thread that launches an operator, and operators that share
a buffer wait for each other. With a thread per device, devices share nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import functools
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Callable, TypeVar

from ...errors import BatchMismatch
from ...native import function
from ..compat import environment, mx
from ..compat.array_types import Nested, leaves
from . import seeds

# Temporary buffers of a thread that launches for several devices: one for every operator that may be in flight.
# DenseNet-201 asks for about 200 on each device.
_BUFFERS = 512
# Of one whose operators follow each other anyway, as those of recomputed blocks do, where MXNet's default is 4. MXNet
# keeps them all, each as large as the largest operator needs.
_FEW_BUFFERS = 1


_num_passes, _begin_pass = function("gp_num_passes", 0, keeps_lock=True), function("gp_begin_pass", 0, keeps_lock=True)
_end_passes = function("gp_end_passes", 1, keeps_lock=True)


class _Here(threading.local):
    """What belongs to the thread that runs this code."""

    device: mx.Context | str | tuple | None = None  # for which it launches: of a device thread, or of `acting_as`
    hands_over = False  # whether its calls are launched from the threads of their devices, see `launch_by_device`


here = _Here()
_threads: dict[mx.Context | str, DeviceThread] = {}
_lock = threading.Lock()
_starting = threading.Lock()  # of a thread's buffers: their number is a variable of the whole process

# Objects of threading.local whose attribute `value` is the innermost scope of the thread.
_SCOPES = (
    mx.name.NameManager._current,
    mx.attribute.AttrScope._current,
    mx.util._NumpyArrayScope._current,
    mx.gluon.block._BlockScope._current,
    mx.Context._default_ctx,
)

_Result = TypeVar("_Result")


class State:
    """Copy of the state of the thread that makes it, for a call in another thread.

    That is: flags of MXNet's C library, scopes of its Python code (names, default device, ...), context variables.
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._flags = mx.autograd.is_recording(), mx.autograd.is_training(), mx.util.is_np_shape()
        self._scopes = [vars(scope).copy() for scope in _SCOPES]

    def call(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call a function in another thread, once; that has the state of the one that made this object from then on."""
        for scope, values in zip(_SCOPES, self._scopes):
            vars(scope).clear()
            vars(scope).update(values)
        recording, training, shapes = self._flags
        mx.autograd.set_recording(recording)
        mx.autograd.set_training(training)
        if mx.util.is_np_shape() != shapes:  # after the scopes: MXNet refuses NumPy arrays without these shapes
            mx.util.set_np_shape(shapes)
        return self._context.run(function, *arguments)


@contextlib.contextmanager
def joint_pass() -> Iterator[None]:
    """Count the backward passes within this block, on all devices, as one, when gradients are marked as fresh.

    See `native/marks.c`.
    """
    before = _num_passes()
    try:  # before it begins: Ctrl-C may come when it has, and MXNet's marks would stay hidden
        _begin_pass()
        yield
    finally:
        _end_passes(before)


class _Job:
    """A function for a device thread, and what became of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function: Callable[[], Any] | None = function
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()  # held until the function has ended
        self.done.acquire()
        self._ending = threading.Lock()
        self._has_begun = self._is_left = False

    def run(self) -> None:
        with self._ending:
            self._has_begun = True
        try:
            if self._function is not None:  # not interrupted before its turn
                self.result = self._function()
        except BaseException as error:  # every exception is raised again in the thread that waits
            self.error = error
        with self._ending:
            self._function = None
            if self._is_left:
                self.result = self.error = None  # whose traceback leads back here, and to the caller's arrays
        self.done.release()

    def interrupt(self, thread: threading.Thread) -> None:
        """Raise KeyboardInterrupt in `thread` if it runs this job, and in no other one; never run it after this."""
        with self._ending:
            self._is_left, self.result, self.error = True, None, None
            if not self._has_begun:
                self._function = None
            elif self._function is not None:
                assert thread.ident is not None  # it has been started
                number = ctypes.c_ulong(thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(KeyboardInterrupt))


class DeviceThread:
    """The thread of one device. It runs one function at a time, in the order of the calls.

    A thread that launches for several devices has a name in place of the device, and more temporary buffers. One that
    launches a part of a device's operators has (name, device), and a single buffer.
    """

    def __init__(self, device: mx.Context | str | tuple) -> None:
        self.device = device
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"gluon_parallel {device}", daemon=True)
        self.thread.start()

    def __call__(self, function: Callable[[], _Result]) -> _Result:
        """Run ``function()`` in this thread, wait for it, and return its result or raise its exception.

        After Ctrl-C the function is interrupted too: at its next line of Python, or when MXNet returns.
        """
        job = _Job(function)
        try:
            self.jobs.put(job)
            job.done.acquire()
        except KeyboardInterrupt:
            job.interrupt(self.thread)
            raise
        if job.error is not None:
            error, job.error = job.error, None
            try:
                raise error
            finally:
                del error  # a traceback that holds its own exception is freed late
        return job.result

    def _run(self) -> None:
        here.device = self.device
        is_named, is_part = isinstance(self.device, str), isinstance(self.device, tuple)
        copies = _BUFFERS if is_named else _FEW_BUFFERS
        own = environment("MXNET_CPU_TEMP_COPY", copies) if is_named or is_part else contextlib.nullcontext()
        with _starting, own:
            seeds.follow(self.device)  # the thread's first call of MXNet makes its buffers
        seen = 0  # seeds
        while True:
            try:
                job = self.jobs.get()
                if job is None:
                    return
                if seen != seeds.num_calls:
                    seen = seeds.num_calls
                    seeds.follow(self.device)
                job.run()
                del job
            except KeyboardInterrupt:  # of a job that ended at that moment
                continue


def thread_of(device: mx.Context | str | tuple) -> DeviceThread:
    """The thread of `device`, started at its first use; it ends with the program. See :class:`DeviceThread`."""
    thread = _threads.get(device)
    if thread is None:
        with _lock:
            thread = _threads.get(device) or _threads.setdefault(device, DeviceThread(device))
    return thread


@contextlib.contextmanager
def acting_as(device: mx.Context | str) -> Iterator[None]:
    """Within this block, this thread launches for that device, or for what `device` names; it hands no call over.

    :func:`.launch_by_device` otherwise hands calls of MXNet over to the threads of their devices.
    """
    before = here.device
    here.device = device
    try:
        yield
    finally:
        here.device = before


def device_threads() -> dict[int, mx.Context | str]:
    """{identifier, as in ``sys._current_frames()``: device} of all device threads."""
    return {one.thread.ident: one.device for one in list(_threads.values()) if one.thread.ident}


def parallel_apply(function: Callable[..., _Result], shards: Iterable[Nested]) -> list[_Result]:
    """Call ``function(*shard)`` for one shard after the other, each time from the thread of the shard's device.

    It is never called for two shards at the same time. MXNet's operators are asynchronous, so the devices compute in
    parallel all the same. If forward and backward pass are launched like this, the devices share
    neither MXNet's temporary buffers nor its random generators.

    The function sees the caller's recording and training mode, NumPy mode, name and attribute scopes, default device
    and context variables; the caller does not see those that it sets. Random numbers are those of the last
    ``mx.random.seed``, and differ between devices. The thread of a device starts at its first use and ends with the
    program.

    Args:
        function: must not read a result (``asnumpy``, ``asscalar``, ``wait_to_read``) if the net has layers that wait
            for the other devices, because the calls for these have not begun.
        shards: one per device, for instance from :func:`split_and_load`: a tuple or list of arguments, or one argument.
            Arguments may be nested. All NDArrays in one shard lie on one device; those of a GPU's shard may also be on
            a CPU.

    Returns:
        The list of results, in the order of the shards.

    Raises:
        BatchMismatch: a shard holds no NDArray, NDArrays of several GPUs, or of several CPU devices and no GPU.
        Exception: what `function` raised for a shard, with its own traceback. The later shards are not launched.

    Example:
        >>> net = mx.gluon.nn.Dense(1, in_units=2)
        >>> net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
        >>> shards = [(mx.nd.ones((3, 2), mx.cpu(0)),), (mx.nd.ones((1, 2), mx.cpu(1)),)]
        >>> [y.shape for y in parallel_apply(net, shards)]
        [(3, 1), (1, 1)]
    """
    calls = []
    for number, shard in enumerate(shards):
        arguments = tuple(shard) if isinstance(shard, (tuple, list)) else (shard,)
        calls.append((device_of(arguments, number), arguments))
    return [call_from(device, function, *arguments) for device, arguments in calls]


def apply_on(function: Callable[..., _Result], calls: Sequence[tuple[mx.Context, Sequence[Any]]]) -> list[_Result]:
    """:func:`parallel_apply` of the arguments for each device; for a single one from the caller's thread."""
    if len(calls) != 1:
        return [call_from(device, function, *arguments) for device, arguments in calls]
    [(device, arguments)] = calls
    if here.device is not None:  # this thread launches for a device, or for a step, anyway
        return [function(*arguments)]
    with acting_as(device):
        return [function(*arguments)]


def call_from(device: mx.Context, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call ``function(*arguments)`` from the thread of `device`, as :func:`parallel_apply` does."""
    if here.device == device:
        return contextvars.copy_context().run(function, *arguments)
    return thread_of(device)(functools.partial(State().call, function, *arguments))


def device_of(arguments: Nested, number: int) -> mx.Context:
    """The one device of a shard's NDArrays: its GPU if there is one, else its CPU device."""
    found: dict[mx.Context, str] = {}  # where the first one of each device is
    for where, leaf in leaves(arguments, f"shards[{number}]"):
        if isinstance(leaf, mx.nd.NDArray):
            found.setdefault(leaf.ctx, where)
    candidates = [device for device in found if device.device_type == "gpu"] or list(found)
    if len(candidates) != 1:
        places = "; ".join(f"{where} is on {device}" for device, where in found.items()) or "there is none"
        raise BatchMismatch(
            f"shards[{number}] must hold NDArrays of one GPU or of one CPU device, which decides the thread; got: "
            f"{places}. gp.split_and_load(batch, devices) makes such shards"
        )
    return candidates[0]


def end_all() -> None:
    """At the end of a program, end all device threads, each after its functions and within 5 seconds."""
    with _lock:
        threads = list(_threads.values())
        _threads.clear()
    for thread in threads:
        thread.jobs.put(None)
        thread.thread.join(5)


def _forget_threads() -> None:
    global _lock, _starting
    _lock, _starting = threading.Lock(), threading.Lock()
    _threads.clear()
    here.__dict__.clear()


atexit.register(end_all)
os.register_at_fork(after_in_child=_forget_threads)
assert mx is not None  # MXNet's own exit handlers must be registered before ours, to run after them
