"""Operators whose passes are compiled: which may be, how MXNet gets them, and what Python does where one needs help."""

from __future__ import annotations

import ctypes
import functools
import threading
import traceback
from typing import Any

import numpy as np

from ..compat import mx
from ..errors import BarrierBroken
from ..kvstore.shared import FUTEX
from ..moments import channel_shape
from .compiled import Compiled

_MOMENT = 0.1  # seconds after which a meeting is left to Python
_CREATE_OPERATOR = 6  # of the callbacks by which MXNet knows an operator
_TYPES = {0: "float32", 1: "float64"}  # MXNet's numbers for them
_DIRECTIONS = "forward", "backward"

_integer, _address, _described = ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(mx.base.MXCallbackList)
_strings, _integers = ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_int)
_Creator = ctypes.CFUNCTYPE(_integer, ctypes.c_char_p, _integer, _strings, _strings, _described)
_Create = ctypes.CFUNCTYPE(
    _integer, ctypes.c_char_p, _integer, ctypes.POINTER(_integers), _integers, _integers, _described, _address
)
_Delete = ctypes.CFUNCTYPE(_integer, _address)
_Help = ctypes.CFUNCTYPE(_integer, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_Function = ctypes.CFUNCTYPE(_integer)

made = threading.local()  # .description: what this thread made last when MXNet asked Python what an operator is
_operators: dict[int, _Operator] = {}  # address of the record -> operator, as long as MXNet has it
_kept: list[Any] = []  # functions that MXNet has the address of


class _Operator:
    """One call site of one layer on one device, with the record that its compiled passes work on."""

    def __init__(self, settings, place, device, shape):
        code = _compiled()
        outer, channels, inner = channel_shape(shape, settings.axis)
        place.make_lane(channels)
        self.place, self.device = place, device
        self.error: Any = None
        words = self.words = np.zeros(code.num_words(channels), np.int64)
        words[code.LIBRARY], words[code.LAYER] = _library().ctypes.data, place.lane.words.ctypes.data
        words[code.NUMBER] = place.lane.number(device)
        words[code.CALLS] = place.barrier.count(device).ctypes.data
        words[code.OUTER], words[code.CHANNELS], words[code.INNER] = outer, channels, inner
        words[code.FIX_GAMMA], words[code.CONSTANT] = settings.fix_gamma, settings.use_global_stats
        reals = words.view(np.float64)
        reals[code.MOMENTUM], reals[code.EPSILON] = settings.momentum, settings.epsilon
        self.contexts = (_address * 3)(*[words.ctypes.data] * 3)

    def meet(self, key, where):
        """The meeting at `key` in Python; the values at that address become those of the whole batch."""
        values = self._values(key, where)
        since = self.words[_compiled().CAME_AT] / 1e9
        values[:] = self.place.meet(_named(key), self.device, values.copy(), since)

    def exchange(self, key, where):
        """The same for the other processes."""
        try:
            values = self._values(key, where)
            values[:] = self.place.gather(_named(key), values.copy())
        except Exception as error:
            self.place.barrier.close(error)
            raise

    def fail(self, what, where):
        """The arrays that the pass should have written, of the handles at that address, tell whoever waits for them."""
        code = _compiled()
        kind, direction = divmod(what, 2)
        handles = ctypes.cast(where, ctypes.POINTER(_address))
        arrays = [mx.nd.NDArray(_address(handles[i]), writable=True) for i in range(*code.OUTPUTS[direction])]
        error = self.error
        if kind == code.NO_MEMORY:
            error = mx.base.MXNetError(mx.base.py_str(mx.base._LIB.MXGetLastError()))
        elif kind == code.NO_FORWARD:
            error = BarrierBroken(f"{self.place.name}: the backward pass of a forward pass that failed")
        self.error = None
        self.place.callback_failed(error, arrays)

    def _values(self, key, where):
        size = 2 * int(self.words[_compiled().CHANNELS]) + (1 if key % 2 == 0 else 0)
        return np.ctypeslib.as_array((ctypes.c_double * size).from_address(where))


def _named(key):
    call, direction = divmod(key, 2)
    return _DIRECTIONS[direction], call


@functools.cache
def _compiled():
    from . import callbacks  # here: Numba takes its time

    return callbacks


def _helping(function):
    """A C function of (address of the record, two more words): 0, or 1 after an exception, which the record keeps."""

    def run(record, first, second):
        operator = _operators[record]
        try:
            function(operator, first, second)
            return 0
        except Exception as error:
            operator.error = error
            return 1

    _kept.append(_Help(run))
    return _kept[-1]


@functools.cache
def _library():
    """The record of what compiled code calls."""
    from . import meeting as code

    words = np.zeros(code.NUM_LIBRARY_WORDS, np.int64)
    libc, library = ctypes.CDLL(None), mx.base._LIB
    for word, function in (
        (code.SYSCALL, libc.syscall), (code.YIELD, libc.sched_yield), (code.CLOCK, libc.clock_gettime),
        (code.GET_DATA, library.MXNDArrayGetData), (code.FREE, library.MXNDArrayFree),
        (code.MEET, _helping(_Operator.meet)), (code.EXCHANGE, _helping(_Operator.exchange)),
        (code.FAIL, _helping(_Operator.fail)),
    ):  # fmt: skip
        words[word] = ctypes.cast(function, _address).value or 0
    words[code.FUTEX] = FUTEX
    words[code.SECONDS], words[code.NANOSECONDS] = 0, int(_MOMENT * 1e9)
    return words


@_Delete
def _delete(record):
    _operators.pop(record, None)
    return 1


@functools.cache
def _passes(dtype):
    """What MXNet calls for an operator of that precision."""
    forward, backward = (ctypes.cast(function.address, _Function) for function in _compiled().passes(dtype))
    return (_Function * 3)(ctypes.cast(_delete, _Function), forward, backward)


def _runs_compiled(place, device, dtypes):
    """Whether an operator of that place does: on a CPU, if all arrays have one precision, which kernels exist for."""
    if place is None or not device.startswith("cpu(") or not FUTEX:
        return False
    return place.arithmetic.get("cpu", Compiled) is Compiled and len(set(dtypes)) == 1 and dtypes[0] in _TYPES


def register(name, in_python, find):
    """Have MXNet call compiled passes for the operator `name` where possible, and those of `in_python` elsewhere.

    Args:
        name: of a custom operator that is not registered yet.
        in_python: the name of a registered one; what it makes to describe itself has `settings`, and says so in `made`.
        find: function of these settings that returns their place, or None.
    """
    creator = mx.operator._registry.ref_holder[mx.operator._registry.counter - 1]  # of the one registered last

    @_Creator
    def create_description(_name, num, keys, values, result):
        if not creator(in_python.encode(), num, keys, values, result):
            return 0
        description = made.description
        create = _creates(description.settings, find, ctypes.cast(result[0].callbacks[_CREATE_OPERATOR], _Create))
        description.kept = create, result[0].callbacks[_CREATE_OPERATOR]
        result[0].callbacks[_CREATE_OPERATOR] = ctypes.cast(create, _Function)
        return 1

    _kept.append(create_description)
    mx.base.check_call(mx.base._LIB.MXCustomOpRegister(name.encode(), create_description))


def _creates(settings, find, create_in_python):
    @_Create
    def create(context, num, shapes, num_dims, dtypes, result, state):
        try:
            device, place = context.decode(), find(settings)
            if not _runs_compiled(place, device, dtypes[:num]):
                return create_in_python(context, num, shapes, num_dims, dtypes, result, state)
            operator = _Operator(settings, place, device, tuple(shapes[0][: num_dims[0]]))
            _operators[operator.words.ctypes.data] = operator
            contexts = ctypes.cast(operator.contexts, ctypes.POINTER(_address))
            passes = ctypes.cast(_passes(_TYPES[dtypes[0]]), ctypes.POINTER(_Function))
            result[0] = mx.base.MXCallbackList(3, passes, contexts)
            return 1
        except Exception:
            traceback.print_exc()  # as MXNet does, which cannot take it either
            return 0

    return create
