"""Arithmetic of the passes by MXNet's operators: runs the graphs of `operator_graphs` through MXNet's C API."""

import numba
import numpy as np
from numba import carray, from_dtype, types

from ....engine.atomics import compiled, pointer, vector, words
from .. import operator_graphs as graphs
from ..operator_graphs import GRAPH
from ..operator_state import MXNET_FAILED, RESULT, STATE, Arithmetic, offset
from . import c_functions as api
from .c_functions import STEP

_INPUTS, _OUTPUTS, _NUM_OUTPUTS, _WHERE = map(offset, ("inputs", "outputs", "num_outputs", "where"))
_State, _i64, _nothing = from_dtype(STATE), types.int64, types.void


@compiled(_i64(_State, _i64))
def _temporary(op, array):
    """The array, which is freed at the end of the pass."""
    op.temporaries[op.num_temporaries] = array
    op.num_temporaries += 1
    return array


@compiled(_nothing(_State, _i64, _i64))
def _run(op, number, num_outputs):
    """Queue a graph that writes to the arrays in ``op.outputs``; if `num_outputs` is 0, to new ones, put there."""
    if op.failed:
        return
    graph = carray(pointer(op.graphs), graphs.NUM_GRAPHS, GRAPH)[number]
    for i in range(graph.num_inputs):
        op.inputs[i] = words(op.address + graph.inputs[i], 1)[0]
    op.num_outputs, op.where = num_outputs, op.address + _OUTPUTS if num_outputs > 0 else 0
    status = api.MXInvokeCachedOp(
        graph.handle, graph.num_inputs, op.address + _INPUTS, op.address + _NUM_OUTPUTS, op.address + _WHERE
    )
    if status != 0:
        op.failed = MXNET_FAILED
    elif num_outputs == 0:
        new = words(op.where, op.num_outputs)
        for i in range(new.size):
            op.outputs[i] = _temporary(op, new[i])


@compiled(_nothing(_State, _i64, _i64))
def _add(op, array, value):
    """array += value"""
    op.total, op.value, op.outputs[0] = array, value, array
    _run(op, graphs.ADD, 1)


@compiled(_nothing(_State, _i64, _i64, _i64))
def _write(op, number, array, adds):
    """Write the only output of a graph to an array, or add it."""
    op.outputs[0] = array
    _run(op, number, 0 if adds else 1)
    if adds:
        _add(op, array, op.outputs[0])


@compiled(_i64(_State, _i64))
def _shaped(op, array):
    """The same memory as (outer, C, inner); 0 for no array."""
    if array == 0 or op.failed:
        return 0
    op.inputs[0], op.inputs[1], op.inputs[2] = op.outer, op.channels, op.inner
    if api.MXNDArrayReshape64(array, 3, op.address + _INPUTS, 0, op.address + RESULT) != 0:
        op.failed = MXNET_FAILED
        return 0
    return _temporary(op, op.result[0])


@compiled(_nothing(_State, _i64, _i64))
def _copy_from_device(op, array, size):
    """Wait for an array, and copy it to ``op.staging``."""
    if op.failed or api.MXNDArraySyncCopyToCPU(array, op.copied, size) != 0:
        op.failed = MXNET_FAILED
        return
    if not op.is_double:
        staging, copied = vector(op.staging, size), carray(pointer(op.copied), size, np.float32)
        for i in range(size):  # (Numba takes seconds to compile an assignment of whole arrays of two types)
            staging[i] = copied[i]


@compiled(_nothing(_State, _i64, _i64))
def _copy_to_device(op, array, size):
    """Copy ``op.staging`` to an array."""
    if not op.is_double:
        staging, copied = vector(op.staging, size), carray(pointer(op.copied), size, np.float32)
        for i in range(size):
            copied[i] = staging[i]
    if op.failed or api.MXNDArraySyncCopyFromCPU(array, op.copied, size) != 0:
        op.failed = MXNET_FAILED


@compiled(_nothing(_State))
def _centre(op):
    """``op.centred`` becomes x - pivot."""
    _run(op, graphs.SUBTRACT_PIVOT, 0)
    op.centred = op.outputs[0]


@compiled(STEP, make=numba.cfunc)
def _open(address):
    op = carray(pointer(address), 1, STATE)[0]
    op.x, op.y, op.dy, op.dx = _shaped(op, op.x), _shaped(op, op.y), _shaped(op, op.dy), _shaped(op, op.dx)
    if op.dy != 0 and op.is_narrow:
        _run(op, graphs.WIDEN, 0)
        op.dy = op.outputs[0]


@compiled(STEP, make=numba.cfunc)
def _close(address):
    op = carray(pointer(address), 1, STATE)[0]
    for number in range(op.num_temporaries):
        api.MXNDArrayFree(op.temporaries[number])
    op.num_temporaries = op.centred = 0


@compiled(STEP, make=numba.cfunc)
def _measure(address):
    op = carray(pointer(address), 1, STATE)[0]
    channels, count = op.channels, op.outer * op.inner
    _run(op, graphs.MEASURE, 0)
    op.centred = op.outputs[0]
    _copy_from_device(op, op.outputs[1], 3 * channels)
    message, staging = vector(op.message, 1 + 2 * channels), vector(op.staging, 3 * channels)
    message[0] = count
    for c in range(channels):
        message[1 + c] = staging[c] + staging[channels + c]
        message[1 + channels + c] = staging[2 * channels + c] * count


@compiled(STEP, make=numba.cfunc)
def _take_batch(address):
    op = carray(pointer(address), 1, STATE)[0]
    channels = op.channels
    mean, variance, staging = vector(op.mean, channels), vector(op.variance, channels), vector(op.staging, 5 * channels)
    for c in range(channels):
        staging[channels + c] = mean[c] - staging[c]  # the pivot is still there
        staging[2 * channels + c] = variance[c]
        staging[3 * channels + c] = (1 - op.momentum) * mean[c]
        staging[4 * channels + c] = (1 - op.momentum) * variance[c]
    _copy_to_device(op, op.batch_rows, 5 * channels)
    op.outputs[0], op.outputs[1] = op.running_mean, op.running_variance
    _run(op, graphs.UPDATE_RUNNING, 2)


@compiled(STEP, make=numba.cfunc)
def _take_running(address):
    op = carray(pointer(address), 1, STATE)[0]
    op.outputs[0], op.outputs[1], op.outputs[2] = op.pivot, op.centre, op.batch_variance
    _run(op, graphs.TAKE_RUNNING, 3)


@compiled(STEP, make=numba.cfunc)
def _normalise(address):
    op = carray(pointer(address), 1, STATE)[0]
    if op.centred == 0:
        _centre(op)
    _write(op, graphs.NORMALISE, op.y, op.adds)


@compiled(STEP, make=numba.cfunc)
def _sums(address):
    op = carray(pointer(address), 1, STATE)[0]
    channels = op.channels
    _centre(op)
    dgamma = op.new_dgamma if op.dgamma == 0 or op.adds_gamma else op.dgamma
    dbeta = op.new_dbeta if op.dbeta == 0 or op.adds_beta else op.dbeta
    op.outputs[0], op.outputs[1], op.outputs[2] = op.sums, dgamma, dbeta
    _run(op, graphs.SUMS, 3)
    if op.dgamma != 0 and op.adds_gamma:
        _add(op, op.dgamma, dgamma)
    if op.dbeta != 0 and op.adds_beta:
        _add(op, op.dbeta, dbeta)
    if op.call >= 0:
        _copy_from_device(op, op.sums, 2 * channels)
        message, staging = vector(op.message, 2 * channels), vector(op.staging, 2 * channels)
        rstd = vector(op.rstd, channels)
        for c in range(channels):
            message[c] = staging[c]
            message[channels + c] = staging[channels + c] / rstd[c]


@compiled(STEP, make=numba.cfunc)
def _gradient(address):
    op = carray(pointer(address), 1, STATE)[0]
    channels = op.channels
    if op.call >= 0:
        message, staging = vector(op.message, 2 * channels), vector(op.staging, 2 * channels)
        rstd, count = vector(op.rstd, channels), max(op.count, 1.0)
        for c in range(channels):
            staging[c] = message[channels + c] * rstd[c] / count
            staging[channels + c] = message[c] / count
        _copy_to_device(op, op.gradient_rows, 2 * channels)
    _write(op, graphs.GRADIENT if op.call >= 0 else graphs.CONSTANT_GRADIENT, op.dx, op.adds)


OPERATORS = Arithmetic(_open, _measure, _take_batch, _take_running, _normalise, _sums, _gradient, _close)
