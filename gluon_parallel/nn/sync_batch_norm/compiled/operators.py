"""Arithmetic of the passes by MXNet's operators, called through its C API: for GPUs, float16 and mixed precisions.

A pass meets its host once: one packed vector comes down from the device, and one goes up. Gamma, beta and the running
statistics never leave the device. All of it is computed in float32, or in float64 where an array is of that.
"""

import ctypes
import functools

import numba
import numpy as np
from numba import carray, from_dtype, types

from ....compat import mx
from ....engine.atomics import compiled, pointer, vector
from .. import operator_state as state
from ..operator_state import OPERATOR, STATE, Arithmetic
from . import c_functions as api
from .c_functions import STEP

# Numbers of the operators in the table that `prepared` makes.
FIRST_VALUES, SUBTRACT_CHANNELS, MOMENTS, SUM, MULTIPLY, SUBTRACT, ADD, BATCH_NORM, FOLLOW, TO_FLOAT32 = range(10)
_BULK = 32  # more operators than a pass has
_NEW = 0  # instead of an array to write to
# Where these fields of a record are, from its beginning.
_INPUTS, _OUTPUTS, _NUM_OUTPUTS, _WHERE = map(state.offset, ("inputs", "outputs", "num_outputs", "where"))

_State, _i64, _nothing = from_dtype(STATE), types.int64, types.void


@functools.cache
def prepared(epsilon, momentum):
    """(NUM_OPERATORS,) OPERATOR: handles, and parameters as C strings; kept, for compiled code has the addresses.

    The statistics of the batch come down as moments of x - (a value of each channel), so that a large mean cancels
    before anything is squared. What normalises is BatchNorm with given statistics, in one pass over x. The running
    statistics follow by an optimizer's update: w - lr * (wd * w - gradient), with lr = 1 - momentum and wd = 1. (It
    takes lr as float32, so in float64 too they follow to 1e-8 only.)
    """
    rate = 1 - momentum
    calls = [
        ("slice", {"begin": "(0, None, 0)", "end": "(1, None, 1)"}),
        ("broadcast_sub", {}),
        ("moments", {"axes": "(0, 2)", "keepdims": "True"}),
        ("sum", {"axis": "(0, 2)", "keepdims": "True"}),
        ("elemwise_mul", {}),
        ("elemwise_sub", {}),
        ("elemwise_add", {}),
        ("BatchNorm", {"eps": repr(epsilon), "use_global_stats": "True", "fix_gamma": "False"}),
        ("multi_sgd_update", {"num_weights": "2", "lrs": f"({rate}, {rate})", "wds": "(1, 1)", "rescale_grad": "-1"}),
        *(("Cast", {"dtype": dtype}) for dtype in ("float32", "float64", "float16")),  # in the order of MXNet's numbers
    ]
    table = np.zeros(len(calls), OPERATOR)
    for row, (name, parameters) in zip(table, calls):
        handle = ctypes.c_void_p()
        mx.base.check_call(mx.base._LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
        row["handle"], row["num_parameters"] = handle.value or 0, len(parameters)
        row["keys"], row["values"] = _strings(parameters), _strings(parameters.values())
    return table


_kept: list[ctypes.Array] = []  # of C strings


def _strings(words):
    array = (ctypes.c_char_p * max(len(words), 1))(*(word.encode() for word in words))
    _kept.append(array)
    return ctypes.addressof(array)


@compiled(_i64(_State, _i64, _i64, _i64))
def _invoke(op, number, num_inputs, num_outputs):
    """Queue an operator on the arrays in ``op.inputs``, which writes to those in ``op.outputs``; to a new one if none.

    Returns the first output: an array of ours, or one that is freed at the end of the pass; 0 once an operator has
    failed.
    """
    if op.failed:
        return 0
    op.num_outputs, op.where = num_outputs, op.address + _OUTPUTS if num_outputs > 0 else 0
    operator = carray(pointer(op.operators), number + 1, OPERATOR)[number]
    status = api.MXImperativeInvoke(
        operator.handle, num_inputs, op.address + _INPUTS, op.address + _NUM_OUTPUTS, op.address + _WHERE,
        operator.num_parameters, operator.keys, operator.values,
    )  # fmt: skip
    if status != 0:
        op.failed = state.MXNET_FAILED
        return 0
    first = carray(pointer(op.where), 1, np.int64)[0]
    if num_outputs == 0:
        op.temporaries[op.num_temporaries] = first
        op.num_temporaries += 1
    return first


@compiled(_i64(_State, *[_i64] * 4))
def _call(op, number, out, first, second):
    """The same for an operator of one or two inputs (`second` is 0) and one output, `out` or _NEW."""
    op.inputs[0], op.inputs[1], op.outputs[0] = first, second, out
    return _invoke(op, number, 1 if second == 0 else 2, 0 if out == _NEW else 1)


@compiled(_i64(_State, _i64, types.int32))
def _temporary(op, array, status):
    """A new array, which is freed at the end of the pass; 0 if the C function that made it has failed."""
    if status != 0:
        op.failed = state.MXNET_FAILED
        return 0
    op.temporaries[op.num_temporaries] = array
    op.num_temporaries += 1
    return array


@compiled(_i64(_State, *[_i64] * 5))
def _normal(op, x, scale, shift, centre, out):
    """(x - the row `centre`) * rstd * scale + shift, by BatchNorm with given statistics; in `out`, or a new array."""
    if op.failed:
        return 0
    if out == _NEW:
        op.inputs[0], op.inputs[1], op.inputs[2] = op.outer, op.channels, op.inner
        status = api.MXNDArrayCreateEx64(
            op.address + _INPUTS, 3, op.device_type, op.device_id, 1, op.dtype, op.address + state.RESULT
        )
        out = _temporary(op, op.result[0], status)
    op.inputs[0], op.inputs[1], op.inputs[2] = x, scale, shift
    op.inputs[3], op.inputs[4] = op.rows[centre], op.rows[state.VARIANCE]
    # It returns two vectors as well, which are not needed; made anew each time, they would cost more than they are.
    op.outputs[0], op.outputs[1], op.outputs[2] = out, op.rows[state.UNUSED_MEAN], op.rows[state.UNUSED_VARIANCE]
    return _invoke(op, BATCH_NORM, 5, 3)


@compiled(_i64(_State, _i64))
def _dtype(op, array):
    op.result[0] = 0
    if op.failed or api.MXNDArrayGetDType(array, op.address + state.RESULT) != 0:
        op.failed = state.MXNET_FAILED
    return op.result[0]


@compiled(_i64(_State, _i64))
def _shaped(op, array):
    """The same memory as (outer, C, inner)."""
    if op.failed:
        return 0
    op.inputs[0], op.inputs[1], op.inputs[2] = op.outer, op.channels, op.inner
    status = api.MXNDArrayReshape64(array, 3, op.address + _INPUTS, 0, op.address + state.RESULT)
    return _temporary(op, op.result[0], status)


@compiled(_i64(_State, _i64))
def _wide(op, array):
    """The array in the precision that is computed in: itself, or a copy."""
    return array if _dtype(op, array) == op.dtype else _call(op, TO_FLOAT32 + op.dtype, _NEW, array, 0)


@compiled(_i64(_State, _i64, _i64))
def _target(op, array, adds):
    """Where an operator can write a result straight away: the array itself, or _NEW; then :func:`_give` follows."""
    return array if not adds and _dtype(op, array) == op.dtype else _NEW


@compiled(_nothing(_State, _i64, _i64, _i64))
def _give(op, value, array, adds):
    """Write a result to an array, or add it, if :func:`_target` has not been that already."""
    if adds:
        _call(op, ADD, array, array, _call(op, TO_FLOAT32 + _dtype(op, array), _NEW, value, 0))
    elif value != array:
        _call(op, TO_FLOAT32 + _dtype(op, array), array, value, 0)


@compiled(_nothing(_State, _i64, _i64))
def _down(op, array, size):
    """Wait for an array, and stage it on the host."""
    if op.failed or api.MXNDArraySyncCopyToCPU(array, op.copied, size) != 0:
        op.failed = state.MXNET_FAILED
        return
    if not op.is_double:
        staging, copied = vector(op.staging, size), carray(pointer(op.copied), size, np.float32)
        for i in range(size):  # (Numba takes seconds to compile an assignment of whole arrays of two types)
            staging[i] = copied[i]


@compiled(_nothing(_State, _i64, _i64))
def _up(op, array, size):
    """Copy what is staged to the device."""
    if not op.is_double:
        staging, copied = vector(op.staging, size), carray(pointer(op.copied), size, np.float32)
        for i in range(size):
            copied[i] = staging[i]
    if op.failed or api.MXNDArraySyncCopyFromCPU(array, op.copied, size) != 0:
        op.failed = state.MXNET_FAILED


@compiled(_nothing(_State, types.boolean))
def _centre(op, anew):
    """``op.centred`` becomes x - pivot: (outer, C, inner); the pivot is a new one if so said."""
    wide = _wide(op, op.x)
    shaped = _shaped(op, wide)
    if anew:
        _call(op, FIRST_VALUES, op.columns[state.PIVOT], shaped, 0)
    op.centred = _call(op, SUBTRACT_CHANNELS, _NEW if wide == op.x else shaped, shaped, op.columns[state.PIVOT])


@compiled(STEP, make=numba.cfunc)
def _open(address):
    """What a pass queues until it waits for a result is one piece of work to the engine."""
    op = carray(pointer(address), 1, STATE)[0]
    api.MXEngineSetBulkSize(_BULK, op.address + state.RESULT)


@compiled(STEP, make=numba.cfunc)
def _close(address):
    op = carray(pointer(address), 1, STATE)[0]
    api.MXEngineSetBulkSize(0, op.address + state.RESULT)
    for number in range(op.num_temporaries):
        api.MXNDArrayFree(op.temporaries[number])
    op.num_temporaries = op.centred = op.top = op.work = 0


@compiled(STEP, make=numba.cfunc)
def _measure(address):
    op = carray(pointer(address), 1, STATE)[0]
    channels, count = op.channels, op.outer * op.inner
    _centre(op, True)
    op.inputs[0], op.outputs[0], op.outputs[1] = (
        op.centred,
        op.columns[state.SHARD_MEAN],
        op.columns[state.SHARD_VARIANCE],
    )
    _invoke(op, MOMENTS, 1, 2)
    _down(op, op.moments_rows, 3 * channels)
    message, staging = vector(op.message, 1 + 2 * channels), vector(op.staging, 3 * channels)
    message[0] = count
    for c in range(channels):
        message[1 + c] = staging[c] + staging[channels + c]
        message[1 + channels + c] = staging[2 * channels + c] * count


@compiled(STEP, make=numba.cfunc)
def _take_batch(address):
    op = carray(pointer(address), 1, STATE)[0]
    channels = op.channels
    mean, variance, staging = vector(op.mean, channels), vector(op.variance, channels), vector(op.staging, 3 * channels)
    for c in range(channels):
        staging[c] = mean[c] - staging[c]  # the pivot is still there
        staging[channels + c] = variance[c]
        staging[2 * channels + c] = mean[c]
    _up(op, op.batch_rows, 3 * channels)
    means, variances = _wide(op, op.running_mean), _wide(op, op.running_variance)
    op.inputs[0], op.inputs[1], op.inputs[2], op.inputs[3] = (
        means,
        op.rows[state.MEAN],
        variances,
        op.rows[state.VARIANCE],
    )
    op.outputs[0], op.outputs[1] = means, variances
    _invoke(op, FOLLOW, 4, 2)
    _give(op, means, op.running_mean, 0)
    _give(op, variances, op.running_variance, 0)


@compiled(STEP, make=numba.cfunc)
def _take_running(address):
    op = carray(pointer(address), 1, STATE)[0]
    _give(op, op.running_mean, op.rows[state.PIVOT], 0)
    _give(op, op.rows[state.ZEROS], op.rows[state.CENTRE], 0)
    _give(op, op.running_variance, op.rows[state.VARIANCE], 0)


@compiled(STEP, make=numba.cfunc)
def _normalise(address):
    op = carray(pointer(address), 1, STATE)[0]
    if op.centred == 0:
        _centre(op, False)
    scale = op.rows[state.ONES] if op.fix_gamma else _wide(op, op.gamma)
    out = _shaped(op, op.y)
    _give(op, _normal(op, op.centred, scale, _wide(op, op.beta), state.CENTRE, _target(op, out, op.adds)), out, op.adds)


@compiled(STEP, make=numba.cfunc)
def _sums(address):
    op = carray(pointer(address), 1, STATE)[0]
    channels = op.channels
    _centre(op, False)
    op.top = _wide(op, _shaped(op, op.dy))
    op.work = _normal(op, op.centred, op.rows[state.ONES], op.rows[state.ZEROS], state.CENTRE, _NEW)
    _call(op, SUM, op.columns[state.TOTAL], op.top, 0)
    _call(op, SUM, op.columns[state.DOT], _call(op, MULTIPLY, op.work, op.top, op.work), 0)
    if op.dbeta != 0:
        _give(op, op.rows[state.TOTAL], op.dbeta, op.adds_beta)
    if op.dgamma != 0:
        _give(op, op.rows[state.ZEROS if op.fix_gamma else state.DOT], op.dgamma, op.adds_gamma)
    if op.call >= 0:
        _down(op, op.sums_rows, 2 * channels)
        message, staging, rstd = (
            vector(op.message, 2 * channels), vector(op.staging, 2 * channels), vector(op.rstd, channels)
        )  # fmt: skip
        for c in range(channels):
            message[c] = staging[c]
            message[channels + c] = staging[channels + c] / rstd[c]


@compiled(STEP, make=numba.cfunc)
def _gradient(address):
    op = carray(pointer(address), 1, STATE)[0]
    channels, top = op.channels, op.top
    if top == 0:
        top = _wide(op, _shaped(op, op.dy))
    if op.call >= 0:
        message, staging, rstd = (
            vector(op.message, 2 * channels), vector(op.staging, 2 * channels), vector(op.rstd, channels)
        )  # fmt: skip
        for c in range(channels):
            staging[c] = message[channels + c] * rstd[c] / max(op.count, 1.0)
            staging[channels + c] = message[c] / max(op.count, 1.0)
        _up(op, op.gradient_rows, 2 * channels)
        share = _normal(op, op.centred, op.rows[state.SLOPE], op.rows[state.INTERCEPT], state.CENTRE, op.work)
        top = _call(op, SUBTRACT, share, top, share)
    scale = op.rows[state.ONES] if op.fix_gamma else _wide(op, op.gamma)
    out = _shaped(op, op.dx)
    _give(op, _normal(op, top, scale, op.rows[state.ZEROS], state.ZEROS, _target(op, out, op.adds)), out, op.adds)


OPERATORS = Arithmetic(_open, _measure, _take_batch, _take_running, _normalise, _sums, _gradient, _close)
