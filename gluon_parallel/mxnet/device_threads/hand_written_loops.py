"""Hand-written loops: operators of one Python thread are launched from the thread of each device.

:func:`launch_by_device` replaces functions of MXNet's C library, as MXNet's Python code sees them. Calls of operators,
hybridized blocks and the backward pass are handed over to the thread of the device on which their first array lies. The
functions that make views and record a function are only watched.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, Callable, Union

from ..compat import mx
from .thread import State, here, joint_pass, thread_of

_CFunction = Callable[..., int]  # of MXNet's C library
_Handles = Union[ctypes.Array, ctypes.c_void_p]  # of arrays; or a null pointer

_LIB = mx.base._LIB
_CPU = 1  # MXNet's number of that kind of device
_JOINT = "several devices"  # the thread that launches a backward pass over several devices whose graphs are connected

_lock = threading.Lock()
_installed = False
_connected = False  # whether a graph over several devices has been recorded: then heads do not show the devices
_last_backward: dict[str, float] = {}  # device, or _JOINT -> when its last backward pass was launched
_cpu = functools.lru_cache(None)(mx.cpu)


def launch_by_device() -> None:
    """From now on, launch what this Python thread calls on a CPU device from the thread of that device.

    Needed in programs whose layers wait for other devices (SyncBatchNorm): operators that one thread launches share
    MXNet's temporary buffers, and an operator behind such a layer keeps a buffer that the other device may need first.
    Operators without inputs (``nd.zeros``, ``nd.random.uniform``) and everything on GPUs are launched as ever. It costs
    about 40 us per call.
    """
    global _installed
    here.hands_over = True
    if _installed:
        return
    with _lock:
        if _installed:
            return
        _LIB.MXImperativeInvokeEx = _invoke(_LIB.MXImperativeInvokeEx)
        _LIB.MXInvokeCachedOpEx = _invoke(_LIB.MXInvokeCachedOpEx)
        _LIB.MXAutogradBackwardEx = _backward(_LIB.MXAutogradBackwardEx)
        _LIB.MXCustomFunctionRecord = _record_function(_LIB.MXCustomFunctionRecord)
        _LIB.MXNDArrayAt = _view(_LIB.MXNDArrayAt)
        _LIB.MXNDArraySlice = _view(_LIB.MXNDArraySlice)
        _LIB.MXNDArrayReshape64 = _view(_LIB.MXNDArrayReshape64)
        _installed = True


def may_have_gone_backward(device: str, since: float) -> bool:
    """Whether a backward pass was launched after that time (of ``time.monotonic``) which may include `device`."""
    return any(_last_backward.get(name, 0) > since for name in (device, _JOINT))


def _place_of(handle: int) -> tuple[int, int]:
    """The kind and number of the device on which the array of that handle lies."""
    kind, number = ctypes.c_int(), ctypes.c_int()
    _LIB.MXNDArrayGetContext(ctypes.c_void_p(handle), ctypes.byref(kind), ctypes.byref(number))
    return kind.value, number.value


def _device_of(handle: int) -> mx.Context | None:
    """The CPU device on which the array lies; None for any other kind of device."""
    kind, number = _place_of(handle)
    return _cpu(number) if kind == _CPU else None


def _invoke(original: _CFunction) -> _CFunction:
    copy = ctypes.c_void_p()
    mx.base.check_call(_LIB.NNGetOpHandle(b"_copyto", ctypes.byref(copy)))

    def invoke(
        operator: ctypes.c_void_p, num_inputs: ctypes.c_int, inputs: Any, num_outputs: Any, outputs: Any, *options: Any
    ) -> int:
        call = functools.partial(original, operator, num_inputs, inputs, num_outputs, outputs, *options)
        is_copy = operator.value == copy.value and num_outputs._obj.value
        is_joint = is_copy and _note_connection(inputs[0], outputs._obj[0])
        hands_over = here.hands_over and here.device is None
        device = _device_of(inputs[0]) if num_inputs.value and hands_over else None
        if device is None:
            return call()
        # What follows from another device's pass may wait for that of this device, whose buffers it must not keep then.
        follows = _connected and any(map(_is_joint, inputs[: num_inputs.value]))
        launching = (_JOINT, device) if follows else device
        _launch(launching, call, num_outputs._obj, (outputs._obj, options[-1]._obj))  # the last: storage types
        if is_joint or follows:
            _mark_as_joint(outputs._obj[: num_outputs._obj.value])
        return 0

    return invoke


def _record_function(original: _CFunction) -> _CFunction:
    """Of an autograd.Function, whose inputs and outputs may lie on several devices."""

    def record_function(
        num_inputs: ctypes.c_int, inputs: ctypes.Array, num_outputs: ctypes.c_int, outputs: ctypes.Array, callbacks: Any
    ) -> int:
        is_joint = _note_connection(*inputs[: num_inputs.value], *outputs[: num_outputs.value])
        status = original(num_inputs, inputs, num_outputs, outputs, callbacks)
        if is_joint:
            _mark_as_joint(outputs[: num_outputs.value])
        return status

    return record_function


def _view(original: _CFunction) -> _CFunction:
    """MXNDArrayAt and others, which make a view of an array."""

    def view(array: ctypes.c_void_p, *arguments: Any) -> int:
        status = original(array, *arguments)
        if _connected and _is_joint(array.value):
            _mark_as_joint([arguments[-1]._obj.value])
        return status

    return view


def _note_connection(*arrays: int) -> bool:
    """Whether an operator connects the recorded graphs of the devices on which these arrays lie."""
    global _connected
    connects = mx.autograd.is_recording() and len(set(map(_place_of, arrays))) > 1
    if connects and not _connected:
        _connected = True
        _push_one_by_one()
    return connects


def _mark_as_joint(arrays: Sequence[int]) -> None:
    """Note that these follow from another device's arrays: in a flag that MXNet reads for variables alone."""
    if mx.autograd.is_recording():
        for handle in arrays:
            _LIB.MXNDArraySetGradState(ctypes.c_void_p(handle), 1)


def _is_joint(handle: int | None) -> bool:
    """Whether :func:`_mark_as_joint` has marked the array of that handle, which is no variable then."""
    flag, gradient = ctypes.c_int(), ctypes.c_void_p()
    _LIB.MXNDArrayGetGradState(ctypes.c_void_p(handle), ctypes.byref(flag))
    if flag.value:
        _LIB.MXNDArrayGetGrad(ctypes.c_void_p(handle), ctypes.byref(gradient))
    if gradient.value:
        _LIB.MXNDArrayFree(gradient)
    return bool(flag.value) and not gradient.value


def _push_one_by_one() -> None:
    """Have MXNet push each operator of its backward passes alone, from now on."""
    # It pushes up to 15 operators of one device as one function of the engine. In a graph over several devices some may
    # be in front of another device's layers, and wait behind an operator that waits for these. MXNet reads the number
    # from the environment once, so it is changed where MXNet keeps it.
    names = "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD", "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN"
    read = next((int(os.environ[name]) for name in names if name in os.environ), 15)
    try:
        find = _LIB["_ZN5mxnet10Imperative3GetEv"]  # mxnet::Imperative::Get()
    except AttributeError:  # a library without it
        return
    find.restype = ctypes.c_void_p
    number = ctypes.c_int.from_address(find() + 24)  # behind two flags and two counters of 8 bytes each
    if number.value == read:  # else it is another version's
        number.value = 0


def _backward(original: _CFunction) -> _CFunction:
    """MXAutogradBackwardEx: the backward pass from the heads, one device after the other where that is the same."""

    def backward(num: int, heads: ctypes.Array, gradients: _Handles, num_variables: int, *options: Any) -> int:
        places = {_place_of(heads[index]) for index in range(num)}
        names = [_JOINT] if _connected else [f"{mx.Context.devtype2str[kind]}({number})" for kind, number in places]
        _last_backward.update(dict.fromkeys(names, time.monotonic()))
        hands_over = here.hands_over and here.device is None
        devices = [_device_of(heads[index]) for index in range(num)] if hands_over else [None]
        if None in devices:
            return original(num, heads, gradients, num_variables, *options)

        def call(heads: ctypes.Array = heads, gradients: _Handles = gradients) -> int:
            return original(len(heads), heads, gradients, num_variables, *options)

        if not _connected and not num_variables:
            with joint_pass():
                for device in dict.fromkeys(devices):
                    chosen = [index for index in range(num) if devices[index] == device]
                    picked: list[Any] = [_picked(array, chosen) for array in (heads, gradients)]
                    _launch(device, functools.partial(call, *picked))
            return 0
        device = _JOINT if _connected or len(set(devices)) > 1 else devices[0]
        outputs = [reference._obj for reference in options[-2:]] if num_variables else []  # arrays, storage types
        with joint_pass():
            return _launch(device, call, ctypes.c_int(num_variables), outputs)

    return backward


def _picked(handles: _Handles, chosen: Sequence[int]) -> _Handles:
    """These elements of a C array of handles; a null pointer stays one."""
    if isinstance(handles, ctypes.c_void_p):
        return handles
    return (ctypes.c_void_p * len(chosen))(*(handles[index] for index in chosen))


def _launch(
    device: mx.Context | str | tuple, call: Callable[[], int], num_outputs: Any = None, outputs: Sequence[Any] = ()
) -> int:
    """Run a call of MXNet's C library in the thread of `device`.

    MXNet lists what it returns in memory of that thread: `num_outputs` long, copied here at the C pointers `outputs`.
    """
    caller = sys._getframe(1)

    # The default keeps the caller's frame, and so the arrays that the call has by their handles only, after Ctrl-C.
    def launch(_caller: FrameType = caller) -> int:
        mx.base.check_call(call())  # here: the error's text belongs to the thread too
        for pointer in outputs:
            if pointer and num_outputs.value:
                copied = (pointer._type_ * num_outputs.value)(*pointer[: num_outputs.value])
                pointer.contents = pointer._type_.from_buffer(copied)  # which keeps `copied` alive
        return 0

    return thread_of(device)(functools.partial(State().call, launch))
