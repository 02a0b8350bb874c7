"""Arithmetic of the passes by MXNet's operators: runs the graphs of `operator_graphs` through MXNet's C API."""

import ctypes

import numpy as np
from numba import carray, types

from ....engine.compiled.access import address, address_of_field, pointer, record_at, record_type, vector, words
from ....engine.compiled.functions import c_callback, compiled
from .. import operator_graphs as graphs
from ..operator_graphs import Graph
from ..operator_state import MXNET_FAILED, State
from . import c_functions as api
from .c_functions import STEP
from .kernels import state_at

_State, _i64, _nothing = record_type(State), types.int64, types.void
_graph_at, _GRAPH = record_at(Graph), ctypes.sizeof(Graph)


@compiled(_i64(_State, _i64))
def _temporary(op, status):
    """The array that a C function has returned, which is freed at the end of the pass."""
    if status != 0:
        op.failed = MXNET_FAILED
        return 0
    op.temporaries[op.num_temporaries] = op.result
    op.num_temporaries += 1
    return op.result


@compiled(_i64(_State))
def _new(op):
    """An array without memory, which the operator that writes to it makes."""
    return _temporary(op, api.MXNDArrayCreateNone(address_of_field(op, "result")))


@compiled(_nothing(_State, _i64, _i64))
def _run(op, number, num_outputs):
    """Queue a graph that writes to the first arrays in ``op.outputs``."""
    if op.failed:
        return
    graph = _graph_at(op.graphs + number * _GRAPH)
    for i in range(graph.num_inputs):
        op.inputs[i] = words(address(op) + graph.inputs[i], 1)[0]
    op.num_outputs, op.where = num_outputs, address_of_field(op, "outputs")
    arrays = address_of_field(op, "inputs"), address_of_field(op, "num_outputs"), address_of_field(op, "where")
    if graph.num_parameters == 0:
        status = api.MXInvokeCachedOp(graph.handle, graph.num_inputs, *arrays)
    else:
        parameters = graph.num_parameters, graph.keys, graph.values
        status = api.MXImperativeInvoke(graph.handle, graph.num_inputs, *arrays, *parameters)
    if status != 0:
        op.failed = MXNET_FAILED


@compiled(_nothing(_State, _i64, _i64))
def _add(op, array, value):
    """array += value"""
    op.total, op.value, op.outputs[0] = array, value, array
    _run(op, graphs.ADD, 1)


@compiled(_nothing(_State, _i64, _i64, _i64))
def _write(op, number, array, adds):
    """Write the only output of a graph to an array, or add it."""
    op.outputs[0] = _new(op) if adds else array
    _run(op, number, 1)
    if adds:
        _add(op, array, op.outputs[0])


@compiled(_i64(_State, _i64))
def _widened(op, array):
    """A copy in the dtype that is computed in."""
    op.value, op.outputs[0] = array, _new(op)
    _run(op, graphs.WIDEN, 1)
    return op.outputs[0]


@compiled(_i64(_State, _i64))
def _shaped(op, array):
    """The same memory as (outer, C, inner); 0 for no array."""
    if array == 0 or op.failed:
        return 0
    op.inputs[0], op.inputs[1], op.inputs[2] = op.outer, op.channels, op.inner
    return _temporary(
        op, api.MXNDArrayReshape64(array, 3, address_of_field(op, "inputs"), 0, address_of_field(op, "result"))
    )


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


@c_callback(STEP)
def open(where):
    op = state_at(where)
    op.x, op.y, op.dy, op.dx = _shaped(op, op.x), _shaped(op, op.y), _shaped(op, op.dy), _shaped(op, op.dx)
    op.scale, op.scaled = op.ones if op.fix_gamma else op.gamma, op.dx
    if op.is_narrow:
        op.x = _widened(op, op.x)
    if op.gamma_is_narrow:
        op.scale = _widened(op, op.scale)
    if op.dy != 0 and (op.is_narrow or op.adds or op.dx == 0):
        op.dy = op.scaled = _widened(op, op.dy)


@c_callback(STEP)
def close(where):
    op = state_at(where)
    for number in range(op.num_temporaries):
        api.MXNDArrayFree(op.temporaries[number])
    op.num_temporaries = 0


@c_callback(STEP)
def measure(where):
    op = state_at(where)
    channels, count = op.channels, op.outer * op.inner
    op.centred, op.origin = _new(op), op.centre
    op.outputs[0], op.outputs[1], op.outputs[2], op.outputs[3] = op.centred, op.pivot, op.centre, op.batch_variance
    _run(op, graphs.MEASURE, 4)
    _copy_from_device(op, op.measured_rows, 3 * channels)
    message, staging = vector(op.message, 1 + 2 * channels), vector(op.staging, 3 * channels)
    message[0] = count
    for c in range(channels):
        message[1 + c] = staging[c] + staging[channels + c]
        message[1 + channels + c] = staging[2 * channels + c] * count


@c_callback(STEP)
def take_batch(where):
    op = state_at(where)
    channels = op.channels
    mean, variance, staging = vector(op.mean, channels), vector(op.variance, channels), vector(op.staging, 7 * channels)
    for c in range(channels):
        staging[channels + c] = mean[c] - staging[c]  # the pivot is still there
        staging[2 * channels + c] = variance[c]
        staging[3 * channels + c] = (1 - op.momentum) * mean[c]
        staging[4 * channels + c] = (1 - op.momentum) * variance[c]
        staging[5 * channels + c] = mean[c]
        mean[c] -= mean[c] if op.is_double else np.float32(mean[c])  # from here on: what the device's mean lacks
        staging[6 * channels + c] = mean[c] / np.sqrt(variance[c] + op.epsilon)
    _copy_to_device(op, op.batch_rows, 7 * channels)
    op.outputs[0], op.outputs[1] = op.running_mean, op.running_variance
    _run(op, graphs.UPDATE_RUNNING, 2)


@c_callback(STEP)
def take_running(where):
    op = state_at(where)
    op.centred, op.origin = op.x, op.batch_mean
    op.outputs[0], op.outputs[1], op.outputs[2] = op.batch_mean, op.residual, op.batch_variance
    _run(op, graphs.TAKE_RUNNING, 3)


@c_callback(STEP)
def normalise(where):
    op = state_at(where)
    _write(op, graphs.NORMALISE, op.y, op.adds)


@compiled(_nothing(_State))
def _run_sums(op):
    """Write ``op.scaled`` and the rows of sums; ``op.dy`` may be overwritten."""
    op.outputs[0], op.outputs[1], op.outputs[2] = op.scaled, op.dot, op.sum_dy
    _run(op, graphs.SUMS, 3)
    op.dy = 0


@c_callback(STEP)
def sums(where):
    op = state_at(where)
    channels = op.channels
    _run_sums(op)
    dgamma = _new(op) if op.dgamma == 0 or op.adds_gamma else op.dgamma
    dbeta = _new(op) if op.dbeta == 0 or op.adds_beta else op.dbeta
    op.outputs[0], op.outputs[1] = dgamma, dbeta
    _run(op, graphs.PARAMETER_GRADIENTS, 2)
    if op.dgamma != 0 and op.adds_gamma:
        _add(op, op.dgamma, dgamma)
    if op.dbeta != 0 and op.adds_beta:
        _add(op, op.dbeta, dbeta)
    if op.call >= 0:
        _copy_from_device(op, op.sums_rows, 2 * channels)
        message, staging = vector(op.message, 2 * channels), vector(op.staging, 2 * channels)
        mean, rstd = vector(op.mean, channels), vector(op.rstd, channels)
        for c in range(channels):
            message[c] = staging[c]
            message[channels + c] = staging[channels + c] / rstd[c] - mean[c] * staging[c]


@c_callback(STEP)
def gradient(where):
    op = state_at(where)
    channels = op.channels
    if op.dy != 0:
        _run_sums(op)
    if op.call >= 0:
        message, staging = vector(op.message, 2 * channels), vector(op.staging, 2 * channels)
        mean, rstd, count = vector(op.mean, channels), vector(op.rstd, channels), max(op.count, 1.0)
        for c in range(channels):
            staging[c] = message[channels + c] * rstd[c] ** 2 / count
            staging[channels + c] = message[c] * rstd[c] / count - staging[c] * rstd[c] * mean[c]
        _copy_to_device(op, op.gradient_rows, 2 * channels)
        _write(op, graphs.GRADIENT, op.dx, op.adds)
    elif op.scaled != op.dx:
        _write(op, graphs.NARROW, op.dx, op.adds)
