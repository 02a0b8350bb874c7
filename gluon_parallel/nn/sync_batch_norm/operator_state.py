"""State of one operator instance, which its compiled passes work on, and their Python fallbacks."""

from __future__ import annotations

import ctypes
import math
import traceback
from typing import Any, NamedTuple

import numpy as np

from ...compat import mx
from ...engine.ending import PYTHON_ENDS, keep_after_end
from ...engine.pthread import address_of
from ...errors import BarrierBroken
from . import operator_graphs
from .operator_graphs import ROWS

# One call site of one layer on one device. "Address" is that of an array that `OperatorState` keeps alive; "handle" is
# MXNet's, of an array or an operator.
STATE = np.dtype([
    ("address", "i8"),  # of this record
    ("layer", "i8"),  # address of the layer's RENDEZVOUS
    ("device", "i8"),  # its number there
    ("calls", "i8"),  # address of the number of calls that this device has made
    ("steps", "i8", (8,)),  # addresses of the functions of its `Arithmetic`
    ("is_double", "i8"),  # whether its arrays, or those that it makes of them, are float64; else float32
    ("outer", "i8"), ("channels", "i8"), ("inner", "i8"),  # the shape of x, with the channels in the middle
    ("momentum", "f8"), ("epsilon", "f8"),
    ("fix_gamma", "i8"),  # gamma is 1, whatever it says
    ("constant", "i8"),  # the statistics are constants also while training
    ("mean", "i8"), ("variance", "i8"), ("rstd", "i8"),  # addresses of (C,) float64: what the forward pass has used
    ("count", "f8"),  # values per channel in the whole batch
    ("message", "i8"),  # address of (1 + 2 C,) float64: what is brought to an exchange, and taken from it
    ("call", "i8"),  # number of the forward pass among the device's calls; -1 if its statistics were constants
    ("came_at", "i8"),  # nanoseconds of the monotonic clock: when this device came to its last exchange
    ("complete_at", "i8"), ("met_at", "i8"),  # the same: when all devices had come, and when it had ended
    ("valid", "i8"),  # whether the last forward pass succeeded
    ("failed", "i8"),  # 0, or why this pass fails: one of the words below
    ("result", "i8", (1,)),  # what C functions return by address
    # Arrays of a pass, or 0: MXNet's handles, or addresses where the arithmetic's first step has looked these up.
    ("x", "i8"), ("gamma", "i8"), ("beta", "i8"), ("y", "i8"), ("running_mean", "i8"), ("running_variance", "i8"),
    ("dy", "i8"), ("dx", "i8"), ("dgamma", "i8"), ("dbeta", "i8"),
    ("adds", "i8"), ("adds_gamma", "i8"), ("adds_beta", "i8"),  # whether to add to y or dx, dgamma, dbeta
    # Of MXNet's operators only, see `operator_graphs`. Handles are MXNet's, of arrays:
    ("graphs", "i8"),  # address of NUM_GRAPHS x GRAPH
    ("is_narrow", "i8"), ("gamma_is_narrow", "i8"),  # whether x and gamma have another dtype than is computed in
    ("staging", "i8"),  # address of (7 C,) float64: what goes to the device or comes from it
    ("copied", "i8"),  # the same in the device's dtype; the same memory if that is float64
    ("inputs", "i8", (8,)), ("outputs", "i8", (4,)),  # handles: of the graph that is run; or a shape
    ("num_outputs", "i8"), ("where", "i8"),  # of its outputs
    *((name, "i8") for name in ROWS),  # handles of (C,)
    ("measured_rows", "i8"), ("batch_rows", "i8"), ("sums_rows", "i8"), ("gradient_rows", "i8"),  # several of them
    # Handles, while a pass runs:
    ("scale", "i8"),  # gamma, or ones, in the dtype that is computed in
    ("centred", "i8"), ("origin", "i8"),  # x or x - pivot, (outer, C, inner), and its mean
    ("scaled", "i8"),  # dy * scale * rstd, (outer, C, inner)
    ("total", "i8"), ("value", "i8"),  # handles: what is added up
    ("num_temporaries", "i8"),
    ("temporaries", "i8", (16,)),  # handles to be freed at the end of a pass
])  # fmt: skip
MXNET_FAILED, NOT_MET, NO_FORWARD = 1, 2, 3
NULL, ADD = 0, 3  # of MXNet's requests; the others mean write
OPEN, MEASURE, TAKE_BATCH, TAKE_RUNNING, NORMALISE, SUMS, GRADIENT, CLOSE = range(8)  # the fields of an Arithmetic


def offset(name):
    """Bytes from the beginning of a STATE to this field."""
    assert STATE.fields is not None
    return STATE.fields[name][1]


RESULT = offset("result")


class Arithmetic(NamedTuple):
    """The steps of a layer's passes: compiled C functions of the address of a STATE, which set `failed` if they fail.

    A shard's vectors are on the host, in the state: the statistics and the message.
    """

    open: Any  # at the beginning of a pass
    measure: Any  # the message becomes the shard's moments: (1 + 2 C,) count, mean, squared deviations
    take_batch: Any  # the batch's mean and variance are what follows uses; the running statistics follow them
    take_running: Any  # the running statistics, as they are now, are what follows uses
    normalise: Any  # y = (x - mean) * rstd * gamma + beta
    sums: Any  # dgamma and dbeta of this shard; the message becomes (2 C,): sum dy, sum dy * (x - mean)
    gradient: Any  # dx = gamma * rstd * (dy - mean of dy - xhat * mean of dy * xhat), the means those of the message
    close: Any  # at the end of a pass, however it has ended


# MXNet hands over x, gamma, beta, y, running mean and variance; and dy, x, gamma, two empty ones, three gradients, two
# more. From, to: those that a pass writes.
OUTPUTS = (3, 4), (5, 8)
DIRECTIONS = "forward", "backward"
MEET, EXCHANGE, FAIL = range(3)  # what compiled code asks Python for: the methods of the same names
_METHODS = "meet", "exchange", "fail"

# Compiled code hands an address over, and MXNet holds an operator by it alone; so both are kept here.
_states: dict[int, OperatorState] = keep_after_end({})  # by address, as long as MXNet has the operator


class OperatorState:
    """One call of one layer on one device, from its forward pass until MXNet has no use for its backward pass any more.

    MXNet makes an instance of the operator for every call of a graph without `static_shape`, so states are used again:
    to make one takes as long as several passes. `dtypes` are the NumPy dtypes of x, gamma and beta.
    """

    @classmethod
    def take(cls, settings, group, device, shape, dtypes):
        """A state for an input of that shape: an unused one of the group's, or a new one."""
        axis, channels = settings.axis % len(shape), shape[settings.axis]
        outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        kind = settings, device, channels, dtypes
        unused = group.unused_states.setdefault(kind, [])
        try:
            state = unused.pop()
        except IndexError:
            state = cls(settings, group, device, channels, dtypes)
        state.group, state.kind, state.error = group, kind, None
        record = state.record
        record["valid"] = record["failed"] = 0  # its last forward pass was another operator's
        record["outer"], record["inner"], record["device"] = outer, inner, group.rendezvous.number(state.device)
        _states[state.address] = state
        return state

    def __init__(self, settings, group, device, channels, dtypes):
        self.device = str(device)
        self.group: Any = None  # while MXNet has the operator
        self.kind: Any = None  # of which states it is one
        self.error: Any = None  # of the help that it was given last
        self._vectors = np.zeros((3, channels)), np.zeros(1 + 2 * channels)
        vectors, message = self._vectors
        record = self.record = np.zeros(1, STATE)
        self.address = address_of(record)
        record["address"], record["layer"] = self.address, address_of(group.rendezvous.record)
        record["calls"] = address_of(group.barrier.count(self.device))
        record["channels"] = channels
        record["fix_gamma"], record["constant"] = settings.fix_gamma, settings.use_global_stats
        record["momentum"], record["epsilon"] = settings.momentum, settings.eps
        record["mean"], record["variance"], record["rstd"] = map(address_of, vectors)
        record["message"] = address_of(message)
        record["is_double"] = any(dtype == np.float64 for dtype in dtypes)
        # Kernels on memory where they exist: on a CPU, if all arrays have one precision; MXNet's operators elsewhere.
        code = passes()
        on_memory = device.device_type.startswith("cpu") and len(set(dtypes)) == 1 and group.arithmetic != "operators"
        arithmetic = code.IN_MEMORY.get(dtypes[0], code.OPERATORS) if on_memory else code.OPERATORS
        if arithmetic is code.OPERATORS:
            constants = settings.eps, settings.momentum, settings.fix_gamma
            self._kept = operator_graphs.attach(record, device, channels, *constants, dtypes)
        record["steps"] = [step.address for step in arithmetic]
        self._deletion = deletion(_delete, self.address)
        # What MXNet hands to each of its callbacks: delete, forward, backward.
        self.contexts = (ctypes.c_void_p * 3)(address_of(self._deletion), self.address, self.address)

    def meet(self, key, where):
        """Exchange at `key` in Python; the values at that address become those of the whole batch."""
        values = self._values(key, where)
        since = self.record["came_at"][0] / 1e9
        values[:] = self.group.meet(named(key), self.device, values.copy(), since)

    def exchange(self, key, where):
        """The same for the other processes only; with -1 - key, what has begun in compiled code is finished."""
        has_begun, key = key < 0, max(key, -1 - key)
        try:
            values = self._values(key, where)
            values[:] = self.group.gather(named(key), values.copy(), has_begun)
        except Exception as error:
            self.group.barrier.close(error)
            raise

    def fail(self, what, where):
        """Fail the arrays that the pass should have written, of the handles at that address."""
        reason, direction = divmod(what, 2)
        handles = ctypes.cast(where, ctypes.POINTER(ctypes.c_void_p))
        arrays = [mx.nd.NDArray(ctypes.c_void_p(handles[i]), writable=True) for i in range(*OUTPUTS[direction])]
        error, self.error = self.error, None
        if reason == MXNET_FAILED:
            error = mx.base.MXNetError(mx.base.py_str(mx.base._LIB.MXGetLastError()))
        elif reason == NO_FORWARD:
            error = BarrierBroken(f"{self.group.name}: the backward pass of a forward pass that failed")
        self.group.callback_failed(error, arrays)

    def _values(self, key, where):
        size = 2 * int(self.record["channels"][0]) + (1 if key % 2 == 0 else 0)
        return np.ctypeslib.as_array((ctypes.c_double * size).from_address(where))


def release(address):
    """The operator is gone; its state may be used again, as long as the layer lives."""
    state = _states.pop(address)
    group, state.group = state.group, None
    group.unused_states[state.kind].append(state)
    return 1


_delete = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)(release)


def deletion(function, argument):
    """What the compiled function `delete` is called with, to call that C function with one word."""
    return np.array([address_of(PYTHON_ENDS), ctypes.cast(function, ctypes.c_void_p).value, argument])


def named(key):
    """The direction and the number of a call, from the key of its exchange.

    Example:
        >>> named(7)
        ('backward', 3)
    """
    call, direction = divmod(key, 2)
    return DIRECTIONS[direction], call


@ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 4)
def ask_python(address, method, first, second):
    """Call a method of the state at that address; 0, or 1 after an exception, which the state keeps."""
    state = None
    try:
        state = _states[address]
        getattr(state, _METHODS[method])(first, second)
        return 0
    except BaseException as error:  # Ctrl-C too: the result of a callback that ends with an exception is not defined
        if state is None or method == FAIL:
            traceback.print_exc()  # it reaches the user in no other way
        else:
            state.error = error
        return 1


def passes():
    """The module of the compiled passes, loaded by the first layer, in the thread that makes it: Numba takes time."""
    from .compiled import passes as module

    return module
