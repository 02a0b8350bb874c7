"""Graphs of MXNet's operators that compute a layer's passes on GPUs, in float16 and in mixed precisions.

They compute in float32, or in float64 if an array has that dtype. Gamma, beta and the running statistics never leave
the device; in a pass, one packed array is copied from the device and one to it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...mxnet.arrays import addresses_of
from ...mxnet.blocks import Executor
from ...mxnet.compat import mx
from ...mxnet.library import operator_handle
from ...native.records import C, address_of

# Rows (C,) on the device, in the order in which `native/operators.c` fills and reads them. The pivot is a value of the
# shard: x - pivot is small, so a large mean costs no digits.
# centre = mean - pivot: of the shard, later of the batch. residual = (mean - batch_mean) * rstd, its rounding error.
# mean_share, variance_share: what the batch adds to the running statistics.
MEASURED_ROWS = "pivot", "centre", "batch_variance"
BATCH_ROWS = *MEASURED_ROWS, "mean_share", "variance_share", "batch_mean", "residual"
SUMS_ROWS = "sum_dy", "dot"  # of dy, and of dy * (xhat + residual)
GRADIENT_ROWS = "slope", "intercept"  # dx = scale * (rstd * dy - slope * (xhat + residual) - intercept)
ROWS = *BATCH_ROWS, *SUMS_ROWS, *GRADIENT_ROWS, "ones", "zeros"
SEVERAL_ROWS = {"measured_rows": MEASURED_ROWS, "batch_rows": BATCH_ROWS, "sums_rows": SUMS_ROWS,
                "gradient_rows": GRADIENT_ROWS}  # fmt: skip

# SUMS is `_backward_BatchNorm` with constant statistics: dy * scale * rstd, and both sums. CachedOp refuses operators
# that have no gradient, so it is called by its handle.
_SUMS_INPUTS = "dy", "zeros", "zeros", "x", "scale", "zeros", "batch_mean", "batch_variance"


@functools.cache
def _graphs(
    epsilon: float, momentum: float, fix_gamma: bool, real: np.dtype, *dtypes: np.dtype
) -> dict[int, mx.sym.Symbol]:
    """{number: symbol}; an input has the name of the State's field that holds its array, see sync_batch_norm.h."""
    F, (x_dtype, gamma_dtype, beta_dtype) = mx.sym, dtypes
    x, centred, origin, scale, beta, scaled = map(F.var, ("x", "centred", "origin", "scale", "beta", "scaled"))
    total, value, sum_dy, dot, slope, intercept = map(F.var, ("total", "value", *SUMS_ROWS, *GRADIENT_ROWS))
    _, _, variance, *shares, mean, residual = map(F.var, BATCH_ROWS)
    zeros, running = F.var("zeros"), (F.var("running_mean"), F.var("running_variance"))

    def widen(symbol: mx.sym.Symbol, dtype: np.dtype) -> mx.sym.Symbol:
        return symbol if dtype == real else F.cast(symbol, dtype=real.name)

    def narrow(symbol: mx.sym.Symbol, dtype: np.dtype) -> mx.sym.Symbol:
        return symbol if dtype == real else F.cast(symbol, dtype=dtype.name)

    def affine(data: mx.sym.Symbol, factor: mx.sym.Symbol, shift: mx.sym.Symbol, mean: mx.sym.Symbol) -> mx.sym.Symbol:
        """(data - mean) * rstd * factor + shift, in one pass over the data."""
        return F.BatchNorm(data, factor, shift, mean, variance, eps=epsilon, use_global_stats=True, fix_gamma=False)

    first = F.slice(x, begin=(0, None, 0), end=(1, None, 1))  # (1, C, 1)
    shifted = F.broadcast_sub(x, first)
    dgamma = F.zeros_like(zeros) if fix_gamma else dot - residual * sum_dy
    updated = [
        narrow(momentum * widen(old, dtype) + new, dtype)
        for old, new, dtype in zip(running, shares, (gamma_dtype, beta_dtype))
    ]
    running_mean, running_variance = (F.cast(statistic, dtype=real.name) for statistic in running)
    dx_terms = affine(x, scale * slope, scale * intercept, mean)
    return {
        C.WIDEN: F.cast(value, dtype=real.name),
        C.MEASURE: F.Group([shifted, first, *F.moments(shifted, axes=(0, 2))]),
        C.UPDATE_RUNNING: F.Group(updated),
        C.USE_RUNNING: F.Group([running_mean, F.zeros_like(zeros), running_variance]),
        C.NORMALISE: narrow(affine(centred, scale, widen(beta, beta_dtype), origin), x_dtype),
        C.PARAMETER_GRADIENTS: F.Group([narrow(dgamma, gamma_dtype), F.cast(sum_dy, dtype=beta_dtype.name)]),
        C.GRADIENT: narrow(scaled - dx_terms, x_dtype),
        C.NARROW: F.cast(scaled, dtype=x_dtype.name),
        C.ADD_TO: total + value,
    }


def attach(record: Any, device: mx.Context, settings: Any, dtypes: Sequence[Any]) -> object:
    """Fill the fields of a State that only these graphs need; returns what must live as long as that."""
    channels, epsilon, momentum, fix_gamma = record.channels, settings.eps, settings.momentum, settings.fix_gamma
    real = np.dtype(np.float64 if record.is_double else np.float32)
    if device.device_type.startswith("cpu"):
        device = mx.cpu(0)  # as MXNet labels a custom operator's arrays, whichever CPU device they are on
    values = np.zeros((len(ROWS), channels))
    values[ROWS.index("ones")] = 1
    with mx.autograd.pause(), mx.util.np_array(False), mx.util.np_shape(False):
        # A copy, no operator: this runs amid a net's pass, where MXNet would put our operators into one bulk with the
        # net's, and skip it if an input has failed.
        rows = mx.nd.array(values, ctx=device, dtype=real)
    arrays = {name: rows[i] for i, name in enumerate(ROWS)}
    arrays["pivot"] = arrays["pivot"].reshape((1, channels, 1))
    for name, names in SEVERAL_ROWS.items():
        arrays[name] = rows[ROWS.index(names[0]) :][: len(names)]
    for field, address in zip(arrays, addresses_of(arrays.values())):
        setattr(record, field, address)
    staging = np.zeros(len(BATCH_ROWS) * channels)
    copied = staging.astype(real, copy=False)
    record.staging, record.copied = address_of(staging), address_of(copied)
    record.is_narrow, record.gamma_is_narrow = dtypes[0] != real, dtypes[1] != real and not fix_gamma
    graphs, kept = (C.Graph * C.NUM_GRAPHS)(), []
    parameters = {"eps": epsilon, "use_global_stats": True, "fix_gamma": False}
    texts = [mx.base.c_str_array([str(text) for text in column]) for column in zip(*parameters.items())]
    graphs[C.SUMS].num_parameters = len(parameters)
    graphs[C.SUMS].keys, graphs[C.SUMS].values = map(ctypes.addressof, texts)
    entries = [(C.SUMS, operator_handle("_backward_BatchNorm"), _SUMS_INPUTS)]
    for number, symbol in _graphs(epsilon, momentum, fix_gamma, real, *map(np.dtype, dtypes[:3])).items():
        kept.append(Executor(symbol))
        entries.append((number, kept[-1].handle, symbol.list_inputs()))
    for number, handle, inputs in entries:
        graphs[number].handle, graphs[number].num_inputs = handle.value, len(inputs)
        graphs[number].inputs[: len(inputs)] = [getattr(type(record), name).offset for name in inputs]
    record.graphs = address_of(graphs)
    return arrays, staging, copied, graphs, kept, texts
