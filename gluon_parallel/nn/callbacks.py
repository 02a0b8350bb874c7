"""The custom operator's two passes on a CPU, as compiled functions that MXNet calls without Python's lock.

They do what `operator` does with `compiled`, number for number; whatever goes wrong, or is late, is left to Python.
"""

# mypy: ignore-errors
# Numba reads these functions, Python never runs them.

import numba
import numpy as np
from numba import carray, types

from ..kvstore.atoms import WORD, add, address, call, compiled, get, load, pointer, put
from .compiled import kernels
from .meeting import BACKWARD, CALLBACKS, FAIL, FORWARD, FREE, GET_DATA, KERNELS, MEET, meet, now

# Of an operator on one device: where its layer is, what it is, and what its backward pass needs to know. Two words to
# write clocks and addresses to. Numbers follow, see :func:`num_words`.
LIBRARY, LAYER, NUMBER, CALLS, OUTER, CHANNELS, INNER, FIX_GAMMA, CONSTANT, MOMENTUM, EPSILON = range(11)
VALID, CALL, COUNT, CAME_AT, SCRATCH, SCRATCH_2, NUM_OPERATOR_WORDS = range(11, 18)
_MEAN, _RSTD, _GAMMA, _WORK, _VECTOR = 0, 1, 2, 3, 8  # where numbers begin, in channels; those of kernels are five
NO_MEMORY, NOT_MET, NO_FORWARD = range(3)  # what FAIL is told
_NULL, _ADD = 0, 3  # of MXNet's requests
# MXNet hands over x, gamma, beta, y, running mean and variance; and dy, x, three empty ones, three gradients, two more.
NUM_ARRAYS, OUTPUTS = (6, 10), ((3, 4), (5, 8))  # by direction; from, to

_i64, _f64s = types.int64, types.float64[::1]


def num_words(channels):
    """How long an operator's record is.

    Example:
        >>> num_words(1) - num_words(0)
        10
    """
    return NUM_OPERATOR_WORDS + _VECTOR * channels + 1 + 2 * channels


@compiled(_i64(_i64, _i64))
def _at(op, kind):
    return op + (NUM_OPERATOR_WORDS + kind * get(op, CHANNELS)) * WORD


@compiled(_f64s(_i64, _i64))
def _per_channel(op, kind):
    return carray(pointer(_at(op, kind)), get(op, CHANNELS), np.float64)


@compiled(_f64s(_i64, _i64))
def _vector(op, first):
    """What is brought to a meeting: a count if `first` is 1, and two numbers per channel."""
    return carray(pointer(_at(op, _VECTOR)), first + 2 * get(op, CHANNELS), np.float64)


@compiled(types.float64(_i64, _i64))
def _real(op, word):
    return carray(pointer(op + word * WORD), 1, np.float64)[0]


@compiled(_i64(_i64, types.voidptr, _i64))
def _memory(op, handles, number):
    """Where the values of an array are; it is in the plain layout, so nobody is waited for. 0 if MXNet fails."""
    put(op, SCRATCH, 0)
    handle = load(address(handles) + number * WORD)
    return 0 if call(get(get(op, LIBRARY), GET_DATA), handle, op + SCRATCH * WORD, 0) else get(op, SCRATCH)


@compiled(types.int32(_i64, types.voidptr, _i64, _i64))
def _finish(op, handles, direction, failed):
    """Give the arrays back; if something failed, those that should have been written to Python, which spoils them.

    Returns what MXNet wants to hear: 0 only if nobody could be told in any other way.
    """
    library, told = get(op, LIBRARY), True
    if failed >= 0:
        told = call(get(library, FAIL), op, 2 * failed + direction, address(handles)) == 0
    begin, end = OUTPUTS[direction]
    for number in range(NUM_ARRAYS[direction]):
        if failed < 0 or not begin <= number < end:
            call(get(library, FREE), load(address(handles) + number * WORD), 0, 0)
    return 1 if told else 0


@compiled(types.boolean(_i64, _i64, _i64))
def _met(op, direction, began):
    """Whether the vector has become that of all devices; `began` is when this pass began."""
    library, layer, key = get(op, LIBRARY), get(op, LAYER), 2 * get(op, CALL) + direction
    put(op, CAME_AT, now(library, op + SCRATCH * WORD))
    add(layer + KERNELS * WORD, get(op, CAME_AT) - began)
    if meet(library, layer, key, get(op, NUMBER), _at(op, _VECTOR), op + SCRATCH * WORD, op):
        return True
    return call(get(library, MEET), op, key, _at(op, _VECTOR)) == 0


@compiled([types.void(_i64, real[::1], real[::1], real[::1]) for real in (types.float32, types.float64)])
def _take_moments(op, gammas, running_means, running_variances):
    """Mean, 1 / sqrt(variance + epsilon) and gamma of this pass; running statistics, if all devices have met."""
    mean, rstd, gamma = _per_channel(op, _MEAN), _per_channel(op, _RSTD), _per_channel(op, _GAMMA)
    epsilon, kept, met = _real(op, EPSILON), _real(op, MOMENTUM), get(op, CALL) >= 0
    vector = _vector(op, 1)
    for c in range(mean.size):
        gamma[c] = 1.0 if get(op, FIX_GAMMA) else np.float64(gammas[c])
        if met:
            mean[c] = vector[1 + c]
            variance = vector[1 + mean.size + c] / max(vector[0], 1.0)
            if vector[0] > 0:
                running_means[c] = kept * np.float64(running_means[c]) + (1 - kept) * mean[c]
                running_variances[c] = kept * np.float64(running_variances[c]) + (1 - kept) * variance
        else:
            mean[c] = running_means[c]
            variance = np.float64(running_variances[c])
        rstd[c] = 1 / np.sqrt(variance + epsilon)
    put(op, COUNT, np.int64(vector[0]) if met else 0)


@compiled([types.void(_i64, real[:, ::1]) for real in (types.float32, types.float64)])
def _for_normalise(op, given):
    """What the kernel wants: the mean as the sum of two numbers of the array's precision, and the scale."""
    mean, rstd, gamma = _per_channel(op, _MEAN), _per_channel(op, _RSTD), _per_channel(op, _GAMMA)
    for c in range(mean.size):
        given[0, c] = mean[c]
        given[1, c] = mean[c] - np.float64(given[0, c])
        given[2, c] = gamma[c] * rstd[c]


@compiled([types.void(_i64, real[:, ::1]) for real in (types.float32, types.float64)])
def _for_gradient(op, given):
    """The mean likewise, and the three factors of the gradient, from the sums of all devices."""
    mean, rstd, gamma = _per_channel(op, _MEAN), _per_channel(op, _RSTD), _per_channel(op, _GAMMA)
    vector, count = _vector(op, 0), max(np.float64(get(op, COUNT)), 1.0)
    for c in range(mean.size):
        factor = gamma[c] * rstd[c]
        given[0, c] = mean[c]
        given[1, c] = mean[c] - np.float64(given[0, c])
        given[2, c] = factor
        given[3, c] = given[4, c] = 0.0
        if get(op, CALL) >= 0:
            given[3, c] = factor * rstd[c] * rstd[c] * vector[mean.size + c] / count
            given[4, c] = factor * vector[c] / count


@compiled([types.void(_i64, real[::1], real[::1], _i64, _i64) for real in (types.float32, types.float64)])
def _write(op, dgamma, dbeta, gamma_request, beta_request):
    """Each device keeps its own shard's share: whoever sums gradients over devices adds them up."""
    rstd, vector = _per_channel(op, _RSTD), _vector(op, 0)
    for c in range(rstd.size):
        value = 0.0 if get(op, FIX_GAMMA) else vector[rstd.size + c] * rstd[c]
        if gamma_request != _NULL:
            dgamma[c] = np.float64(dgamma[c]) + value if gamma_request == _ADD else value
        if beta_request != _NULL:
            dbeta[c] = np.float64(dbeta[c]) + vector[c] if beta_request == _ADD else vector[c]


_kernels = kernels()
_measure, _normalise, _sums, _gradient = _kernels.measure, _kernels.normalise, _kernels.sums, _kernels.gradient
_signature = types.int32(types.int32, types.voidptr, types.voidptr, types.voidptr, types.int32, types.voidptr)


def _forward_of(name):
    """MXNet's forward callback for arrays of one precision."""
    dtype = getattr(np, name)

    def forward(_size, handles, _tags, requests, is_train, operator):
        op = address(operator)
        library, layer = get(op, LIBRARY), get(op, LAYER)
        clock, channels = op + SCRATCH * WORD, get(op, CHANNELS)
        entered = now(library, clock)
        put(op, VALID, 0)  # what a failed forward pass must not leave to the backward pass
        put(op, CALL, -1)
        failed = -1
        where_x, where_gamma, where_beta = _memory(op, handles, 0), _memory(op, handles, 1), _memory(op, handles, 2)
        where_y, where_mean, where_variance = _memory(op, handles, 3), _memory(op, handles, 4), _memory(op, handles, 5)
        if 0 in (where_x, where_gamma, where_beta, where_y, where_mean, where_variance):
            failed = NO_MEMORY
        else:
            shape = get(op, OUTER), channels, get(op, INNER)
            x, y = carray(pointer(where_x), shape, dtype), carray(pointer(where_y), shape, dtype)
            if is_train and not get(op, CONSTANT):
                put(op, CALL, add(get(op, CALLS), 1))
                vector, began = _vector(op, 1), now(library, clock)
                vector[0] = shape[0] * shape[2]
                _measure(x, vector[1 : 1 + channels], vector[1 + channels :])
                if not _met(op, FORWARD, began):
                    failed = NOT_MET
            if failed < 0:
                _take_moments(
                    op, carray(pointer(where_gamma), channels, dtype), carray(pointer(where_mean), channels, dtype),
                    carray(pointer(where_variance), channels, dtype),
                )  # fmt: skip
                put(op, VALID, 1)
                request = carray(requests, 1, np.int32)[0]
                if request != _NULL:
                    given = carray(pointer(_at(op, _WORK)), (3, channels), dtype)
                    _for_normalise(op, given)
                    began = now(library, clock)
                    beta = carray(pointer(where_beta), channels, dtype)
                    _normalise(x, y, given[0], given[1], given[2], beta, request == _ADD)
                    add(layer + KERNELS * WORD, now(library, clock) - began)
        add(layer + CALLBACKS * WORD, now(library, clock) - entered)
        return _finish(op, handles, FORWARD, failed)

    return _named(forward, name)


def _backward_of(name):
    """MXNet's backward callback for arrays of one precision."""
    dtype = getattr(np, name)

    def backward(_size, handles, _tags, requests, _is_train, operator):
        op = address(operator)
        library, layer = get(op, LIBRARY), get(op, LAYER)
        clock, channels = op + SCRATCH * WORD, get(op, CHANNELS)
        entered = now(library, clock)
        failed = -1
        where_dy, where_x = _memory(op, handles, 0), _memory(op, handles, 1)
        where_dx, where_dgamma, where_dbeta = _memory(op, handles, 5), _memory(op, handles, 6), _memory(op, handles, 7)
        request, gamma_request, beta_request = carray(requests, 3, np.int32)
        if 0 in (where_dy, where_x) or request and not where_dx or not where_dgamma or not where_dbeta:
            failed = NO_MEMORY
        elif not get(op, VALID):
            failed = NO_FORWARD
        else:
            shape = get(op, OUTER), channels, get(op, INNER)
            x, dy = carray(pointer(where_x), shape, dtype), carray(pointer(where_dy), shape, dtype)
            met, vector, began = get(op, CALL) >= 0, _vector(op, 0), now(library, clock)
            if met or gamma_request != _NULL or beta_request != _NULL:
                _sums(x, dy, _per_channel(op, _MEAN), vector[:channels], vector[channels:])
                _write(
                    op, carray(pointer(where_dgamma), channels, dtype), carray(pointer(where_dbeta), channels, dtype),
                    gamma_request, beta_request,
                )  # fmt: skip
            if met and not _met(op, BACKWARD, began):
                failed = NOT_MET
            elif request != _NULL:
                given = carray(pointer(_at(op, _WORK)), (5, channels), dtype)
                _for_gradient(op, given)
                began, dx = now(library, clock), carray(pointer(where_dx), shape, dtype)
                _gradient(x, dy, dx, given[0], given[1], given[2], given[3], given[4], request == _ADD)
                add(layer + KERNELS * WORD, now(library, clock) - began)
        add(layer + CALLBACKS * WORD, now(library, clock) - entered)
        return _finish(op, handles, BACKWARD, failed)

    return _named(backward, name)


def _named(function, name):
    # A name of its own: Numba keeps compiled code by name, and links what another process compiled meanwhile by it.
    function.__name__ = function.__qualname__ = f"{function.__name__}_{name}"
    return compiled(_signature, make=numba.cfunc)(function)


def passes(name):
    """What MXNet calls, forward and backward, for arrays of "float32" or "float64"; compiles them."""
    return _forward_of(name), _backward_of(name)
