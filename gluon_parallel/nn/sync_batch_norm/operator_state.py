"""State of one operator instance, which its compiled passes work on, and their Python fallbacks."""

from __future__ import annotations

import ctypes
import functools
import math
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import numpy as np

from ...compat import mx
from ...engine.compiled.library import Library, once, python_function
from ...engine.compiled.records import Record, address_of, several
from ...engine.ending import INTERPRETER_STATE, keep_after_end
from ...errors import BarrierBroken
from ...kvstore.combine import combine
from . import operator_graphs

if TYPE_CHECKING:  # they import this file
    from .operator import Settings
    from .sync_group import SyncGroup

MXNET_FAILED, NOT_REDUCED, NO_FORWARD = 1, 2, 3  # why a pass fails
NULL, ADD = 0, 3  # of MXNet's requests; the others mean write


class State(Record):
    """One call site of one layer on one device.

    "Address" is that of an array or record that `OperatorState` keeps alive; "handle" is MXNet's, of an array.
    """

    layer: int  # address of the rendezvous's Layer
    device: int  # its number there
    calls: int  # address of a Counter of this device's calls
    arithmetic: int  # address of an Arithmetic
    is_double: int  # whether its arrays, or those that it makes of them, are float64; else float32
    outer: int  # the shape of x, with the channels in the middle: (outer, channels, inner)
    channels: int
    inner: int
    momentum: float
    epsilon: float
    fix_gamma: int  # gamma is 1, whatever it says
    constant: int  # the statistics are constants also while training
    mean: int  # address of (C,) float64, as the next two: what the forward pass has used
    variance: int
    rstd: int
    count: float  # values per channel in the whole batch
    message: int  # address of (1 + 2 C,) float64: what is brought to an exchange, and taken from it
    scratch: int  # address of (5, C) float64, for the arithmetic on memory
    call: int  # number of the forward pass among the device's calls; -1 if its statistics were constants
    arrived_at: int  # nanoseconds of the monotonic clock: when this device came to its last exchange
    complete_at: int  # the same: when all devices had come
    reduced_at: int  # the same: when the exchange had ended
    valid: int  # whether the last forward pass succeeded
    failed: int  # 0, or why this pass fails
    result: int  # what C functions return by address
    # Arrays of a pass, or 0: handles, or addresses where the arithmetic's `open` has looked these up.
    x: int
    gamma: int
    beta: int
    y: int
    running_mean: int
    running_variance: int
    dy: int
    dx: int
    dgamma: int
    dbeta: int
    adds: int  # whether to add to y or dx; to dgamma; to dbeta
    adds_gamma: int
    adds_beta: int
    # The rest is of MXNet's operators only, see `operator_graphs`.
    graphs: int  # address of NUM_GRAPHS x Graph
    is_narrow: int  # whether x, and gamma, have another dtype than is computed in
    gamma_is_narrow: int
    staging: int  # address of (7 C,) float64: what goes to the device or comes from it
    copied: int  # the same in the device's dtype; the same memory if that is float64
    inputs: ctypes.Array = several(8)  # handles: of the graph that is run; or a shape
    outputs: ctypes.Array = several(4)
    num_outputs: int
    where: int  # address of `outputs`
    rows: tuple[str, ...] = operator_graphs.ROWS  # handles of (C,), each
    several_rows: tuple[str, ...] = tuple(operator_graphs.SEVERAL_ROWS)  # handles
    # Handles, while a pass runs:
    scale: int  # gamma, or ones, in the dtype that is computed in
    centred: int  # x or x - pivot, (outer, C, inner)
    origin: int  # its mean
    scaled: int  # dy * scale * rstd, (outer, C, inner)
    total: int  # what is added up
    value: int
    num_temporaries: int
    temporaries: ctypes.Array = several(16)  # handles to be freed at the end of a pass


class Arithmetic(Record):
    """The steps of a layer's passes: addresses of C functions of the address of a State, in which they note failures.

    A shard's vectors are on the host, in the state: the statistics and the message.
    """

    open: int  # at the beginning of a pass
    measure: int  # the message becomes the shard's moments: (1 + 2 C,) count, mean, squared deviations
    take_batch: int  # the batch's mean and variance are what follows uses; the running statistics follow them
    take_running: int  # the running statistics, as they are now, are what follows uses
    normalise: int  # y = (x - mean) * rstd * gamma + beta
    sums: int  # dgamma and dbeta of this shard; the message becomes (2 C,): sum dy, sum dy * (x - mean)
    gradient: int  # dx = gamma * rstd * (dy - mean of dy - xhat * mean of dy * xhat), the means those of the message
    close: int  # at the end of a pass, however it has ended


class Counter(Record):
    """A number that threads count up."""

    value: int


class Deletion(Record):
    """What compiled code calls when MXNet deletes something."""

    python: int  # address of INTERPRETER_STATE
    function: int  # address of a C function of one word
    argument: int


# MXNet hands over x, gamma, beta, y, running mean and variance; and dy, x, gamma, two empty ones, three gradients, two
# more. From, to: those that a pass writes.
OUTPUTS = (3, 4), (5, 8)
FOLDER = f"{__package__}.compiled"
DIRECTIONS = "forward", "backward"

# Compiled code hands an address over, and MXNet holds an operator by it alone; so both are kept here.
_states: dict[int, OperatorState] = keep_after_end({})  # by address, as long as MXNet has the operator


class OperatorState:
    """One call of one layer on one device, from its forward pass until MXNet has no use for its backward pass any more.

    MXNet makes an instance of the operator for every call of a graph without `static_shape`, so states are used again:
    to make one takes as long as several passes. `dtypes` are the NumPy dtypes of x, gamma and beta.
    """

    @classmethod
    def take(
        cls, settings: Settings, group: SyncGroup, device: mx.Context, shape: Sequence[int], dtypes: tuple[Any, ...]
    ) -> OperatorState:
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
        record.valid = record.failed = 0  # its last forward pass was another operator's
        record.outer, record.inner, record.device = outer, inner, group.rendezvous.number(state.device)
        _states[state.address] = state
        return state

    def __init__(
        self, settings: Settings, group: SyncGroup, device: mx.Context, channels: int, dtypes: tuple[Any, ...]
    ) -> None:
        self.device = str(device)
        self.group: Any = None  # while MXNet has the operator
        self.kind: Any = None  # of which states it is one
        self.error: Any = None  # of the help that it was given last
        self._vectors = np.zeros((3, channels)), np.zeros(1 + 2 * channels), np.zeros((5, channels))
        vectors, message, scratch = self._vectors
        record = self.record = State(layer=address_of(group.rendezvous.record), channels=channels)
        self.address = address_of(record)
        record.calls = address_of(group.barrier.count(self.device))
        record.fix_gamma, record.constant = settings.fix_gamma, settings.use_global_stats
        record.momentum, record.epsilon = settings.momentum, settings.eps
        record.mean, record.variance, record.rstd = map(address_of, vectors)
        record.message, record.scratch = address_of(message), address_of(scratch)
        record.is_double = any(dtype == np.float64 for dtype in dtypes)
        # Kernels on memory where they exist: on a CPU, if all arrays have one precision; MXNet's operators elsewhere.
        code = passes()
        on_memory = device.device_type.startswith("cpu") and len(set(dtypes)) == 1 and group.arithmetic != "operators"
        arithmetic = code.in_memory.get(dtypes[0], code.operators) if on_memory else code.operators
        if arithmetic is code.operators:
            self._kept = operator_graphs.attach(record, device, settings, dtypes)
        record.arithmetic = address_of(arithmetic)
        self._deletion = deletion(release, self.address)
        # What MXNet hands to each of its callbacks: delete, forward, backward.
        self.contexts = (ctypes.c_void_p * 3)(address_of(self._deletion), self.address, self.address)

    # The next three answer what compiled code asks, see `passes`.

    def allreduce_devices(self, key: int, where: int) -> None:
        """The values at that address become those of the whole batch, through the layer's barrier."""
        values, group, combine = self._values(key, where), self.group, functools.partial(_combine, key % 2)
        brought = named(key), self.device, values.copy(), group.rendezvous.taking_part
        values[:] = group.barrier.allreduce(*brought, combine, since=self.record.arrived_at / 1e9)

    def allreduce_processes(self, key: int, where: int, has_begun: int) -> None:
        """The same for the other processes only; `has_begun`: compiled code has handed this process's values in."""
        try:
            values = self._values(key, where)
            values[:] = self.group.allreduce_processes(named(key), values.copy(), bool(has_begun))
        except Exception as error:
            self.group.barrier.close(error)
            raise

    def fail(self, reason: int, direction: int, where: int) -> None:
        """Fail the arrays that the pass should have written, of the handles at that address."""
        handles = ctypes.cast(where, ctypes.POINTER(ctypes.c_void_p))
        arrays = [mx.nd.NDArray(ctypes.c_void_p(handles[i]), writable=True) for i in range(*OUTPUTS[direction])]
        error, self.error = self.error, None
        if reason == MXNET_FAILED:
            error = mx.base.MXNetError(mx.base.py_str(mx.base._LIB.MXGetLastError()))
        elif reason == NO_FORWARD:
            error = BarrierBroken(f"{self.group.name}: the backward pass of a forward pass that failed")
        self.group.callback_failed(error, arrays)

    def _values(self, key: int, where: int) -> np.ndarray:
        size = 2 * self.record.channels + (1 if key % 2 == 0 else 0)
        return np.ctypeslib.as_array((ctypes.c_double * size).from_address(where))


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
def release(address: int) -> int:
    """The operator is gone; its state may be used again, as long as the layer lives."""
    state = _states.pop(address)
    group, state.group = state.group, None
    group.unused_states[state.kind].append(state)
    return 1


def _combine(direction: int, vectors: Sequence[np.ndarray]) -> np.ndarray:
    """The packed values of all, from those of each: what compiled code does where it needs no help."""
    return combine(np.stack(vectors), direction)


def deletion(function: Any, argument: int) -> Deletion:
    """What the compiled function `delete` is called with, to call that C function with one word."""
    return Deletion(address_of(INTERPRETER_STATE), ctypes.cast(function, ctypes.c_void_p).value, argument)


def named(key: int) -> tuple[str, int]:
    """The direction and the number of a call, from the key of its exchange.

    Example:
        >>> named(7)
        ('backward', 3)
    """
    call, direction = divmod(key, 2)
    return DIRECTIONS[direction], call


def answering(method: Callable[..., None]) -> Callable[..., int]:
    """A function of an address for compiled code: that method of the state there; 0, or 1 after an exception.

    The state keeps the exception, for `fail` to raise.
    """

    @functools.wraps(method)
    def answer(address: int, *arguments: int) -> int:
        state = None
        try:
            state = _states[address]
            getattr(state, method.__name__)(*arguments)
            return 0
        except BaseException as error:  # Ctrl-C too: what a callback that ends with an exception returns means nothing
            if state is None or method is OperatorState.fail:
                traceback.print_exc()  # it reaches the user in no other way
            else:
                state.error = error
            return 1

    return answer


class Passes(NamedTuple):
    """What the compiled passes give to MXNet and to each other."""

    library: Library
    callbacks: ctypes.Array  # by which MXNet deletes an operator and runs its passes; it looks there until the end
    in_memory: dict[Any, Arithmetic]  # by dtype
    operators: Arithmetic


@once
def passes() -> Passes:
    """The compiled passes, loaded by the first layer, in the thread that makes it: they may have to be compiled."""
    kernels, operators = Library(f"{FOLDER}.kernels"), Library(f"{FOLDER}.operators")
    word = ctypes.c_int64
    code = Library(
        f"{FOLDER}.passes",
        allreduce_devices_in_python=python_function(answering(OperatorState.allreduce_devices), *[word] * 3),
        allreduce_processes_in_python=python_function(answering(OperatorState.allreduce_processes), *[word] * 4),
        fail_in_python=python_function(answering(OperatorState.fail), *[word] * 4),
    )
    callbacks = (ctypes.c_void_p * 3)(*map(code.address, ("delete", "forward", "backward")))
    in_memory = {real: _arithmetic(kernels, f"_{real.__name__}") for real in (np.float32, np.float64)}
    return keep_after_end(Passes(code, callbacks, in_memory, _arithmetic(operators)))


def _arithmetic(code: Library, kind: str = "") -> Arithmetic:
    """Of a library's functions, which have the names of its fields; those that depend on the dtype end in `kind`."""
    names = (field[0] for field in Arithmetic._fields_)
    steps = (name if name in ("open", "close") else name + kind for name in names)
    return Arithmetic(*map(code.address, steps))
