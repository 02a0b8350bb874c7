"""Graphs of MXNet's operators that compute a layer's passes on GPUs, in float16 and in mixed precisions.

They compute in float32, or in float64 if an array has that dtype. Gamma, beta and the running statistics never leave
the device; in a pass, one packed array is copied from the device and one to it.
"""

import functools

import numpy as np

from ...compat import mx
from ...engine.pthread import address_of

GRAPH = np.dtype([
    ("handle", "i8"),  # of MXNet's CachedOp
    ("num_inputs", "i8"),
    ("inputs", "i8", (8,)),  # where the handles of the inputs are: bytes from the beginning of an operator's STATE
])  # fmt: skip
NUM_GRAPHS = 10
(
    MEASURE, SUBTRACT_PIVOT, UPDATE_RUNNING, TAKE_RUNNING, NORMALISE, WIDEN, SUMS, GRADIENT, CONSTANT_GRADIENT, ADD
) = range(NUM_GRAPHS)  # fmt: skip

# Rows (C,) on the device. The pivot is a value of the shard: x - pivot is small, so a large mean costs no digits.
# Centre: mean - pivot. The shares are what the batch's mean and variance add to the running statistics.
BATCH_ROWS = "pivot", "centre", "batch_variance", "mean_share", "variance_share"
GRADIENT_ROWS = "slope", "intercept"  # dx is proportional to dy - (slope * xhat + intercept)
ROWS = *BATCH_ROWS, *GRADIENT_ROWS, "ones", "zeros"

_Executor = mx.nd._internal.CachedOp  # MXNet's own, whatever `mx.nd.CachedOp` is


@functools.cache
def _graphs(epsilon, momentum, fix_gamma, real, x_dtype, gamma_dtype, beta_dtype):
    """Symbols in the order of their numbers; each input has the name of the STATE's field that holds its handle."""
    F = mx.sym
    x, dy, gamma, beta, centred, total, value = map(F.var, ("x", "dy", "gamma", "beta", "centred", "total", "value"))
    pivot, centre, variance, *shares, slope, intercept, ones, zeros = map(F.var, ROWS)
    running = F.var("running_mean"), F.var("running_variance")

    def widen(symbol, dtype):
        return symbol if dtype == real else F.cast(symbol, dtype=real.name)

    def narrow(symbol, dtype):
        return symbol if dtype == real else F.cast(symbol, dtype=dtype.name)

    def affine(data, scale, shift, centre):
        """(data - centre) * rstd * scale + shift, in one pass over the data."""
        return F.BatchNorm(data, scale, shift, centre, variance, eps=epsilon, use_global_stats=True, fix_gamma=False)

    first = widen(F.slice(x, begin=(0, None, 0), end=(1, None, 1)), x_dtype)  # (1, C, 1)
    shifted = F.broadcast_sub(widen(x, x_dtype), first)
    scale, shift = ones if fix_gamma else widen(gamma, gamma_dtype), widen(beta, beta_dtype)
    sum_dy, dot = F.sum(dy, axis=(0, 2)), F.sum(dy * affine(centred, ones, zeros, centre), axis=(0, 2))
    dgamma = F.zeros_like(zeros) if fix_gamma else dot
    share = affine(centred, slope, intercept, centre)
    updated = [
        narrow(momentum * widen(old, dtype) + new, dtype)
        for old, new, dtype in zip(running, shares, (gamma_dtype, beta_dtype))
    ]
    running_mean, running_variance = (F.cast(statistic, dtype=real.name) for statistic in running)
    return {
        MEASURE: F.Group([shifted, F.stack(first, *F.moments(shifted, axes=(0, 2), keepdims=True))]),
        SUBTRACT_PIVOT: F.broadcast_sub(widen(x, x_dtype), pivot),
        UPDATE_RUNNING: F.Group(updated),
        # Pivot, centre, variance:
        TAKE_RUNNING: F.Group([running_mean.reshape((1, -1, 1)), F.zeros_like(zeros), running_variance]),
        NORMALISE: narrow(affine(centred, scale, shift, centre), x_dtype),
        WIDEN: F.cast(dy, dtype=real.name),
        SUMS: F.Group([F.stack(sum_dy, dot), narrow(dgamma, gamma_dtype), narrow(sum_dy, beta_dtype)]),
        GRADIENT: narrow(affine(dy - share, scale, zeros, zeros), x_dtype),
        CONSTANT_GRADIENT: narrow(affine(dy, scale, zeros, zeros), x_dtype),
        ADD: total + value,
    }


def attach(record, device, channels, epsilon, momentum, fix_gamma, dtypes):
    """Fill the fields of a STATE that only these graphs need; what is returned must live as long as that."""
    real = np.dtype(np.float64 if record["is_double"][0] else np.float32)
    if device.device_type.startswith("cpu"):
        device = mx.cpu(0)  # as MXNet labels a custom operator's arrays, whichever CPU device they are on
    values = np.zeros((len(ROWS), channels))
    values[ROWS.index("ones")] = 1
    with mx.autograd.pause(), mx.util.np_array(False), mx.util.np_shape(False):
        # Copied, not computed: MXNet makes operators in the middle of a net's pass, and runs theirs and ours in one
        # bulk, which it skips if the net's input to it has failed.
        rows = mx.nd.array(values, ctx=device, dtype=real)
        sums = mx.nd.empty((2, channels), ctx=device, dtype=real)
        gradients = [mx.nd.empty(channels, ctx=device, dtype=dtype) for dtype in dtypes[1:3]]
    first, last = len(BATCH_ROWS), len(BATCH_ROWS) + len(GRADIENT_ROWS)
    arrays = {name: rows[i] for i, name in enumerate(ROWS)}
    arrays["pivot"] = arrays["pivot"].reshape((1, channels, 1))
    arrays |= {"batch_rows": rows[:first], "gradient_rows": rows[first:last], "sums": sums}
    arrays |= {"new_dgamma": gradients[0], "new_dbeta": gradients[1]}
    for field, array in arrays.items():
        record[field] = array.handle.value
    staging = np.zeros(first * channels)
    copied = staging.astype(real, copy=False)
    record["staging"], record["copied"] = address_of(staging), address_of(copied)
    record["is_narrow"] = dtypes[0] != real
    graphs, executors = np.zeros(NUM_GRAPHS, GRAPH), []
    for number, symbol in _graphs(epsilon, momentum, fix_gamma, real, *map(np.dtype, dtypes[:3])).items():
        inputs = symbol.list_inputs()
        executors.append(_Executor(symbol))
        graph = graphs[number]
        graph["handle"], graph["num_inputs"] = executors[-1].handle.value, len(inputs)
        graph["inputs"][: len(inputs)] = [record.dtype.fields[name][1] for name in inputs]
    record["graphs"] = address_of(graphs)
    return arrays, staging, copied, graphs, executors
