"""Arithmetic of the passes by MXNet's operators, called through its C API: for GPUs, float16 and mixed precisions.

A pass meets its host once: one packed vector comes down from the device, and one goes up. Gamma, beta and the running
statistics never leave the device. All of it is computed in float32, or in float64 where an array is of that.
"""

import ctypes
import functools

import numpy as np
from numba import carray, from_dtype, types

from ....compat import mx
from ....engine.atomics import WORD, compiled, pointer, vector, words
from ..operator_state import (
    ADD,
    CENTRE,
    DOT,
    INTERCEPT,
    MEAN,
    MXNET_FAILED,
    NULL,
    NUM_RESULTS,
    ONES,
    OPERATOR,
    PIVOT,
    SHARD_MEAN,
    SHARD_VARIANCE,
    SLOPE,
    STATE,
    TOTAL,
    UNUSED_MEAN,
    UNUSED_VARIANCE,
    VARIANCE,
    ZEROS,
)
from .c_functions import (
    MXEngineSetBulkSize,
    MXImperativeInvoke,
    MXNDArrayCreateEx64,
    MXNDArrayFree,
    MXNDArrayGetDType,
    MXNDArrayReshape64,
    MXNDArraySyncCopyFromCPU,
    MXNDArraySyncCopyToCPU,
)

# Numbers of the operators in the table that `prepared` makes.
(
    FIRST_VALUES, SUBTRACT_CHANNELS, MOMENTS, SUM, MULTIPLY, SUBTRACT, ADD_UP, BATCH_NORM, FOLLOW,
    TO_FLOAT32, TO_FLOAT64, TO_FLOAT16,
) = range(12)  # fmt: skip
# Among the results of C functions: an operator's inputs, the number of its outputs, where they are, and themselves.
_INPUTS, _NUM_OUTPUTS, _WHERE, _OUTPUTS = 0, 5, 6, 7
_BULK = 32  # more operators than a pass has
_NEW = 0  # instead of an array to write to

_State, _i64, _f64 = from_dtype(STATE), types.int64, types.float64
_nothing, _tuple = types.void, types.UniTuple


@functools.cache
def prepared(epsilon, momentum):
    """(NUM_OPERATORS,) OPERATOR: handles, and parameters as C strings; kept, for compiled code has the addresses.

    The statistics of the batch come down as moments of x - (a value of each channel), so that a large mean cancels
    before anything is squared. What normalises is BatchNorm with given statistics, in one pass over x. The running
    statistics follow by an optimizer's update: w - lr * (wd * w - gradient), with lr = 1 - momentum and wd = 1. (It
    takes lr as float32, so in float64 too they follow to 1e-8 only.)
    """
    over_shards = {"axis": "(0, 2)", "keepdims": "True"}
    rate = 1 - momentum
    calls = [
        ("slice", {"begin": "(0, None, 0)", "end": "(1, None, 1)"}),
        ("broadcast_sub", {}),
        ("moments", {"axes": "(0, 2)", "keepdims": "True"}),
        ("sum", over_shards),
        ("elemwise_mul", {}),
        ("elemwise_sub", {}),
        ("elemwise_add", {}),
        ("BatchNorm", {"eps": repr(epsilon), "use_global_stats": "True", "fix_gamma": "False", "axis": "1"}),
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


@compiled(_i64(_State, _i64))
def _temporary(op, handle):
    """A handle that is freed at the end of the step."""
    op.temporaries[op.num_temporaries] = handle
    op.num_temporaries += 1
    return handle


@compiled([types.boolean(_State, _i64, _tuple(_i64, num), _i64) for num in (1, 2, 3, 4, 5)])
def _invoke(op, number, arrays, num_outputs):
    """Queue an operator that writes to the arrays in the results from _OUTPUTS on; to new ones, left there, if 0."""
    if op.failed:
        return False
    results = words(op.results, NUM_RESULTS)
    for i in range(len(arrays)):
        results[_INPUTS + i] = arrays[i]
    results[_NUM_OUTPUTS] = num_outputs
    results[_WHERE] = op.results + _OUTPUTS * WORD if num_outputs > 0 else 0
    operator = carray(pointer(op.operators), number + 1, OPERATOR)[number]
    status = MXImperativeInvoke(
        operator.handle, len(arrays), op.results + _INPUTS * WORD, op.results + _NUM_OUTPUTS * WORD,
        op.results + _WHERE * WORD, operator.num_parameters, operator.keys, operator.values,
    )  # fmt: skip
    if status != 0:
        op.failed = MXNET_FAILED
    return status == 0


@compiled([_i64(_State, _i64, _tuple(_i64, num), _i64) for num in (1, 2, 3, 4, 5)])
def _call(op, number, arrays, out):
    """Queue an operator; returns its first result: `out`, or a new array. 0 once one has failed."""
    results = words(op.results, NUM_RESULTS)
    results[_OUTPUTS] = out
    if not _invoke(op, number, arrays, 1 if out != _NEW else 0):
        return 0
    if out != _NEW:
        return out
    made = carray(pointer(results[_WHERE]), results[_NUM_OUTPUTS], np.int64)
    for i in range(made.size):
        _temporary(op, made[i])
    return made[0]


@compiled([_nothing(_State, _i64, _tuple(_i64, num), _i64, _i64) for num in (1, 4)])
def _call_2(op, number, arrays, first, second):
    """Queue an operator with two results."""
    outputs = words(op.results + _OUTPUTS * WORD, 2)
    outputs[0], outputs[1] = first, second
    _invoke(op, number, arrays, 2)


@compiled(_i64(_State, *[_i64] * 5))
def _normal(op, x, scale, shift, centre, out):
    """(x - the row `centre`) * rstd * scale + shift, by BatchNorm with given statistics; in `out`, or a new array."""
    results = words(op.results, NUM_RESULTS)
    if out == _NEW:
        results[0], results[1], results[2] = op.outer, op.channels, op.inner
        where = op.results + 3 * WORD
        if op.failed or MXNDArrayCreateEx64(op.results, 3, op.device_type, op.device_id, 1, op.dtype, where) != 0:
            op.failed = MXNET_FAILED
            return 0
        out = _temporary(op, results[3])
    # It returns two vectors as well, which are not needed; made anew each time, they would cost more than they are.
    results[_OUTPUTS], results[_OUTPUTS + 1] = out, op.rows[UNUSED_MEAN]
    results[_OUTPUTS + 2] = op.rows[UNUSED_VARIANCE]
    if not _invoke(op, BATCH_NORM, (x, scale, shift, op.rows[centre], op.rows[VARIANCE]), 3):
        return 0
    return out


@compiled(_i64(_State, _i64))
def _dtype(op, array):
    results = words(op.results, NUM_RESULTS)
    results[0] = 0
    if MXNDArrayGetDType(array, op.results) != 0:
        op.failed = MXNET_FAILED
    return results[0]


@compiled(_i64(_State, _i64, _i64, _i64))
def _shaped(op, array, outer, inner):
    """The same memory as (outer, C, inner)."""
    results = words(op.results, NUM_RESULTS)
    results[0], results[1], results[2], results[3] = outer, op.channels, inner, 0
    if op.failed or MXNDArrayReshape64(array, 3, op.results, 0, op.results + 3 * WORD) != 0:
        op.failed = MXNET_FAILED
        return 0
    return _temporary(op, results[3])


@compiled(_i64(_State, _i64))
def _wide(op, array):
    """The array in the precision that is computed in: itself, or a copy."""
    if _dtype(op, array) == op.dtype:
        return array
    return _call(op, TO_FLOAT32 + op.dtype, (array,), _NEW)


@compiled(_i64(_State, _i64, _i64))
def _target(op, array, request):
    """Where an operator can write a result straight away: the array itself, or _NEW; then :func:`_give` follows."""
    return array if request != ADD and _dtype(op, array) == op.dtype else _NEW


@compiled(_nothing(_State, _i64, _i64, _i64))
def _give(op, value, array, request):
    """Write a result to an array, or add it, if :func:`_target` has not been that already."""
    if request == ADD:
        same = value if _dtype(op, array) == op.dtype else _call(op, TO_FLOAT32 + _dtype(op, array), (value,), _NEW)
        _call(op, ADD_UP, (array, same), array)
    elif value != array:
        _call(op, TO_FLOAT32 + _dtype(op, array), (value,), array)


@compiled(_f64(_State, _i64))
def _staged(op, number):
    if op.is_double:
        return carray(pointer(op.staging), number + 1, np.float64)[number]
    return np.float64(carray(pointer(op.staging), number + 1, np.float32)[number])


@compiled(_nothing(_State, _i64, _f64))
def _stage(op, number, value):
    if op.is_double:
        carray(pointer(op.staging), number + 1, np.float64)[number] = value
    else:
        carray(pointer(op.staging), number + 1, np.float32)[number] = value


@compiled(_nothing(_State, _i64, _i64))
def _down(op, array, size):
    """Wait for an array, and stage it on the host."""
    if not op.failed and MXNDArraySyncCopyToCPU(array, op.staging, size) != 0:
        op.failed = MXNET_FAILED


@compiled(_nothing(_State, _i64, _i64))
def _up(op, array, size):
    """Copy what is staged to the device."""
    if not op.failed and MXNDArraySyncCopyFromCPU(array, op.staging, size) != 0:
        op.failed = MXNET_FAILED


@compiled(_nothing(_State, _i64, types.boolean))
def _centre(op, x, anew):
    """``op.centred`` becomes x - pivot: (outer, C, inner); the pivot is a new one if so said."""
    wide = _wide(op, x)
    shaped = _shaped(op, wide, op.outer, op.inner)
    if anew:
        _call(op, FIRST_VALUES, (shaped,), op.columns[PIVOT])
    op.centred = _call(op, SUBTRACT_CHANNELS, (shaped, op.columns[PIVOT]), _NEW if wide == x else shaped)


@compiled(_nothing(_State))
def begin(op):
    """At the beginning of a pass: what it queues until it waits for a result is one piece of work to the engine."""
    MXEngineSetBulkSize(_BULK, op.results)


@compiled(_nothing(_State))
def close(op):
    """At the end of a pass, however it has ended."""
    MXEngineSetBulkSize(0, op.results)
    for number in range(op.num_temporaries):
        MXNDArrayFree(op.temporaries[number])
    op.num_temporaries = op.centred = op.top = op.work = 0


@compiled(_nothing(_State, _i64))
def measure(op, x):
    """See `arithmetic`, for all of these."""
    _centre(op, x, True)
    _call_2(op, MOMENTS, (op.centred,), op.columns[SHARD_MEAN], op.columns[SHARD_VARIANCE])
    _down(op, op.moments_rows, 3 * op.channels)
    message, count = vector(op.message, 1 + 2 * op.channels), op.outer * op.inner
    message[0] = count
    for c in range(op.channels):
        message[1 + c] = _staged(op, c) + _staged(op, op.channels + c)
        message[1 + op.channels + c] = _staged(op, 2 * op.channels + c) * count


@compiled(_nothing(_State, _i64, _i64))
def take_batch(op, running_mean, running_variance):
    mean = vector(op.mean, op.channels)
    variance = vector(op.variance, op.channels)
    for c in range(op.channels):
        _stage(op, c, mean[c] - _staged(op, c))  # the pivot is still there
        _stage(op, op.channels + c, variance[c])
        _stage(op, 2 * op.channels + c, mean[c])
    _up(op, op.batch_rows, 3 * op.channels)
    means, variances = _wide(op, running_mean), _wide(op, running_variance)
    _call_2(op, FOLLOW, (means, op.rows[MEAN], variances, op.rows[VARIANCE]), means, variances)
    _give(op, means, running_mean, 1)
    _give(op, variances, running_variance, 1)


@compiled(_nothing(_State, _i64, _i64))
def take_running(op, running_mean, running_variance):
    _give(op, running_mean, op.rows[PIVOT], 1)
    _give(op, op.rows[ZEROS], op.rows[CENTRE], 1)
    _give(op, running_variance, op.rows[VARIANCE], 1)


@compiled(_nothing(_State, *[_i64] * 5))
def normalise(op, x, gamma, beta, y, request):
    if op.centred == 0:
        _centre(op, x, False)
    scale = op.rows[ONES] if op.fix_gamma else _wide(op, gamma)
    out = _shaped(op, y, op.outer, op.inner)
    _give(op, _normal(op, op.centred, scale, _wide(op, beta), CENTRE, _target(op, out, request)), out, request)


@compiled(_nothing(_State, *[_i64] * 6))
def sums(op, x, dy, dgamma, dbeta, gamma_request, beta_request):
    _centre(op, x, False)
    op.top = _wide(op, _shaped(op, dy, op.outer, op.inner))
    normal = _normal(op, op.centred, op.rows[ONES], op.rows[ZEROS], CENTRE, _NEW)
    _call(op, SUM, (op.top,), op.columns[TOTAL])
    _call(op, SUM, (_call(op, MULTIPLY, (op.top, normal), normal),), op.columns[DOT])
    op.work = normal
    if beta_request != NULL:
        _give(op, op.rows[TOTAL], dbeta, beta_request)
    if gamma_request != NULL:
        _give(op, op.rows[ZEROS if op.fix_gamma else DOT], dgamma, gamma_request)
    if op.call >= 0:
        _down(op, op.sums_rows, 2 * op.channels)
        message = vector(op.message, 2 * op.channels)
        rstd = vector(op.rstd, op.channels)
        for c in range(op.channels):
            message[c] = _staged(op, c)
            message[op.channels + c] = _staged(op, op.channels + c) / rstd[c]


@compiled(_nothing(_State, *[_i64] * 5))
def gradient(op, x, dy, gamma, dx, request):
    top = op.top
    if top == 0:
        top = _wide(op, _shaped(op, dy, op.outer, op.inner))
    if op.call >= 0:
        message, count = vector(op.message, 2 * op.channels), max(op.count, 1.0)
        rstd = vector(op.rstd, op.channels)
        for c in range(op.channels):
            _stage(op, c, message[op.channels + c] * rstd[c] / count)
            _stage(op, op.channels + c, message[c] / count)
        _up(op, op.gradient_rows, 2 * op.channels)
        share = _normal(op, op.centred, op.rows[SLOPE], op.rows[INTERCEPT], CENTRE, op.work)
        top = _call(op, SUBTRACT, (top, share), share)
    scale = op.rows[ONES] if op.fix_gamma else _wide(op, gamma)
    out = _shaped(op, dx, op.outer, op.inner)
    _give(op, _normal(op, top, scale, op.rows[ZEROS], ZEROS, _target(op, out, request)), out, request)
