"""The custom operator's description: what MXNet asks for before it makes an instance, and the making of both.

MXNet takes any result but 0 for a success. An exception in a Python callback leaves just any result, and Ctrl-C can
raise one before the callback's first line; so only compiled code answers MXNet. Python's part of an answer is in memory
when it is complete.
"""

import numpy as np
from numba import carray, types

from ....engine.compiled.access import address, record_at, words
from ....engine.compiled.functions import c_callback
from ..operator import CallbackList, PropRecord
from .c_functions import create_in_python, describe_in_python

_int, _any = types.int32, types.voidptr
_FLOAT32, _FLOAT16, _UNKNOWN = 0, 2, -1  # MXNet's numbers of dtypes
_DATA, _Y = 0, 3  # of x, gamma, beta; y; running mean and variance

_description_at, _callbacks_at = map(record_at, (PropRecord, CallbackList))


def _listing(field):
    """The C function that gives MXNet the names that this field of a description holds."""

    def give(result, description):
        words(address(result), 1)[0] = _description_at(address(description))[field]
        return 1

    give.__name__ = f"list_{field}"
    return c_callback(_int(_any, _any))(give)


list_arguments = _listing("arguments")  # x, gamma and beta
list_outputs = _listing("outputs")  # y
list_auxiliary_states = _listing("auxiliary_states")  # the running statistics


@c_callback(_int(_int, _any, _any, _any))
def infer_shape(num, num_axes, shapes, description):
    """x (..., C, ...) gives y of its shape, and (C,) for the rest."""
    lengths, where = carray(num_axes, num, np.int32), carray(shapes, num, np.int64)
    size, data = lengths[_DATA], where[_DATA]
    if size <= 0:  # not known yet
        for number in range(num):
            lengths[number] = 0 if number >= _Y else max(lengths[number], 0)
        return 1
    axis = _description_at(address(description)).axis
    axis += size if axis < 0 else 0
    if axis < 0 or axis >= size:
        return 0
    for number in range(num):
        if number not in (_DATA, _Y):
            lengths[number], where[number] = 1, data + 4 * axis
    lengths[_Y], where[_Y] = size, data
    return 1


@c_callback(_int(_int, _any, _any))
def infer_type(num, dtypes, _description):
    """y is like x; the rest float32 beside float16, else like x unless it is known."""
    kinds = carray(dtypes, num, np.int32)
    data = kinds[_DATA]
    for number in range(1, _Y):
        if kinds[number] == _UNKNOWN:
            kinds[number] = _FLOAT32 if data == _FLOAT16 else data
    kinds[_Y], kinds[_Y + 1], kinds[_Y + 2] = data, kinds[1], kinds[2]
    return 1


@c_callback(_int(_any, _any, _any, _any, _any, _any))
def declare_backward_dependency(_dy, _inputs, _outputs, num, result, description):
    """What the backward pass keeps: dy, x, gamma, and y where that is asked for."""
    known = _description_at(address(description))
    carray(num, 1, np.int32)[0] = known.num_dependencies
    words(address(result), 1)[0] = known.dependencies
    return 1


@c_callback(_int(_any, _int, _any, _any, _any, _any, _any))
def create(device, num, shapes, num_axes, dtypes, result, description):
    """An instance for one device."""
    callbacks = _callbacks_at(address(result))
    callbacks.num = 0
    given = address(shapes), address(num_axes), address(dtypes), address(result), address(description)
    create_in_python(address(device), num, *given)
    return 1 if callbacks.num != 0 else 0


@c_callback(_int(_any))
def nothing(_context):
    """What MXNet calls to delete a description that could not be made."""
    return 1


@c_callback(_int(_any, _any, _int, _any, _any, _any))
def describe(failed, _name, num, keys, values, result):
    """A description for these attributes; after a failure what is at `failed`, which MXNet deletes all the same."""
    callbacks, before = _callbacks_at(address(result)), _callbacks_at(address(failed))
    callbacks.num, callbacks.functions, callbacks.contexts = before.num, before.functions, before.contexts
    describe_in_python(num, address(keys), address(values), address(result))
    return 1 if callbacks.num != before.num else 0
