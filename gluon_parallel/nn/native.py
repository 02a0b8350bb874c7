"""How MXNet is given compiled passes for a custom operator, and for which ones it is."""

from __future__ import annotations

import ctypes
import threading
import traceback
from typing import Any

from ..compat import mx
from ..kvstore.shared import FUTEX
from .compiled import Compiled
from .record import Record, callbacks, forget, once

_CREATE_OPERATOR = 6  # of the callbacks by which MXNet knows an operator
_TYPES = {0: "float32", 1: "float64"}  # MXNet's numbers for them

_integer, _address, _described = ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(mx.base.MXCallbackList)
_strings, _integers = ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_int)
_Creator = ctypes.CFUNCTYPE(_integer, ctypes.c_char_p, _integer, _strings, _strings, _described)
_Create = ctypes.CFUNCTYPE(
    _integer, ctypes.c_char_p, _integer, ctypes.POINTER(_integers), _integers, _integers, _described, _address
)
_Delete = ctypes.CFUNCTYPE(_integer, _address)
_Function = ctypes.CFUNCTYPE(_integer)

# MXNet's creator of descriptions returns nothing but C functions; what it has made says so here, to the same thread.
made = threading.local()  # .description
_kept: list[Any] = []  # functions that MXNet has the address of


@_Delete
def _delete(address):
    forget(address)
    return 1


@once
def _passes(dtype):
    """What MXNet calls for an operator of that precision."""
    functions = callbacks().passes(dtype)
    _kept.append(functions)
    forward, backward = (ctypes.cast(function.address, _Function) for function in functions)
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
            record = Record(settings, place, device, tuple(shapes[0][: num_dims[0]]))
            record.contexts = (_address * 3)(*[record.address] * 3)
            passes = ctypes.cast(_passes(_TYPES[dtypes[0]]), ctypes.POINTER(_Function))
            result[0] = mx.base.MXCallbackList(3, passes, ctypes.cast(record.contexts, ctypes.POINTER(_address)))
            return 1
        except Exception:
            traceback.print_exc()  # as MXNet does, which cannot take it either
            return 0

    return create
