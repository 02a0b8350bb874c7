"""Custom operator of SyncBatchNorm: its attributes and description, and the state of each of its instances.

MXNet describes, creates and runs operators through the C library (`native/custom_operator.c`), which asks this file
for what needs Python.
"""

from __future__ import annotations

import ctypes
import functools
import math
import traceback
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from ... import native
from ...errors import BarrierBroken
from ...mxnet.arrays import DTYPES
from ...mxnet.compat import mx
from ...mxnet.engine.ending import INTERPRETER_STATE
from ...mxnet.library import last_error, register_custom_operator
from ...native import keep_after_end
from ...native.records import C, address_of
from ..rewrite_graph import attribute_value
from . import operator_graphs
from .rendezvous import named
from .sync_group import SyncGroup, sync_groups_by_token

NAME = "gluon_parallel_sync_batch_norm"


class Settings(NamedTuple):
    """The operator's attributes, which travel through MXNet as strings: BatchNorm's, and the sync group's token."""

    token: str
    axis: int = 1
    eps: float = 1e-3
    momentum: float = 0.9
    fix_gamma: bool = True
    use_global_stats: bool = False
    keeps_output: bool = False  # for the backward pass, which does not read it

    def group(self) -> SyncGroup:
        """The layer's sync group."""
        group = sync_groups_by_token.get(self.token)
        if group is None:
            raise BarrierBroken(
                "this graph was made by a SyncBatchNorm layer that no longer exists here; keep the net alive while it "
                "is used, or use gp.nn.revert_sync_batchnorm(net) before you take its graph elsewhere"
            )
        return group


# The C library hands an address over, and MXNet holds an operator by it alone; so both are kept here.
props: dict[int, Any] = keep_after_end({})  # descriptions by address, as long as MXNet has them
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
        kind = settings, device, channels, dtypes
        unused = group.unused_states.setdefault(kind, [])
        try:
            state = unused.pop()
        except IndexError:
            state = cls(settings, group, device, channels, dtypes)
        state.group, state.kind = group, kind
        record = state.record
        record.valid = record.failed = 0  # its last forward pass was another operator's
        names = group.rendezvous.names
        record.outer, record.inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        record.device = names.index(state.device) if state.device in names else -1  # where the layer does not live
        _states[state.address] = state
        return state

    def __init__(
        self, settings: Settings, group: SyncGroup, device: mx.Context, channels: int, dtypes: tuple[Any, ...]
    ) -> None:
        self.device = str(device)
        self.group: Any = None  # while MXNet has the operator
        self.kind: Any = None  # of which states it is one
        self._vectors = np.zeros((3, channels)), np.zeros(1 + 2 * channels), np.zeros((5, channels))
        vectors, message, scratch = self._vectors
        record = self.record = C.State(layer=group.rendezvous.address, channels=channels)
        self.address = address_of(record)
        record.calls = address_of(group.rendezvous.calls_of(self.device))
        record.fix_gamma, record.constant = settings.fix_gamma, settings.use_global_stats
        record.momentum, record.epsilon = settings.momentum, settings.eps
        record.mean, record.variance, record.rstd = map(address_of, vectors)
        record.message, record.scratch = address_of(message), address_of(scratch)
        record.is_double = any(dtype == np.float64 for dtype in dtypes)
        # Kernels on memory where they exist: on a CPU, if all arrays have one precision; MXNet's operators elsewhere.
        on_memory = device.device_type.startswith("cpu") and len(set(dtypes)) == 1 and not group.by_operators
        if on_memory and dtypes[0] in (np.float32, np.float64):
            record.arithmetic = _arithmetic_in_memory(record.is_double, -1)
        else:
            record.arithmetic = _arithmetic_of_operators()
            self._kept = operator_graphs.attach(record, device, settings, dtypes)
        self._deletion = deletion(release, self.address)
        # What MXNet hands to each of its callbacks: delete, forward, backward.
        self._contexts = (ctypes.c_void_p * 3)(address_of(self._deletion), self.address, self.address)
        self.where = address_of(self._contexts)

    # The C library calls the next four, see `callbacks`.

    def wait_on(self, key: int, where: int) -> None:
        """See :meth:`.Rendezvous.wait_on`; who has arrived stands at that address."""
        rendezvous = self.group.rendezvous
        arrived = (ctypes.c_int8 * len(rendezvous.names)).from_address(where)
        rendezvous.wait_on(self.device, key, arrived, self.record.arrived_at / 1e9)

    def refuse(self, key: int) -> None:
        """See :meth:`.Rendezvous.refuse`."""
        self.group.rendezvous.refuse(self.device, key)

    def allreduce_processes(self, key: int, where: int, has_begun: int) -> None:
        """The values at the address `where` become those of all processes.

        `has_begun`: the C library has written this process's values to the shared memory, and waits no longer.
        """
        size = 2 * self.record.channels + (key % 2 == C.FORWARD)
        values = np.ctypeslib.as_array((ctypes.c_double * size).from_address(where))
        values[:] = self.group.allreduce_processes(named(key), values.copy(), bool(has_begun))

    def fail(self, reason: int, num: int, where: int) -> None:
        """Fail the arrays that the pass should have written, of the `num` handles at that address."""
        handles = ctypes.cast(where, ctypes.POINTER(ctypes.c_void_p))
        arrays = [mx.nd.NDArray(ctypes.c_void_p(handles[i]), writable=True) for i in range(num)]
        error = self.group.rendezvous.failure
        if reason == C.MXNET_FAILED:
            error = last_error()
        elif reason == C.NO_FORWARD:
            error = BarrierBroken(f"{self.group.name}: the backward pass of a forward pass that failed")
        self.group.callback_failed(error, arrays)


@keep_after_end
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
def release(address: int, states: dict = _states) -> int:  # also when this module's names are gone
    """The operator is gone; its state may be used again, as long as the layer lives."""
    state = states.pop(address)
    group, state.group = state.group, None
    group.unused_states[state.kind].append(state)
    return 1


def deletion(function: Any, argument: int) -> Any:
    """What `gp_delete` is called with, to call that C function with one word."""
    return C.Deletion(address_of(INTERPRETER_STATE), ctypes.cast(function, ctypes.c_void_p).value, argument)


def answering(method: Callable[..., None]) -> Callable[..., int]:
    """A function of an address for the C library: that method of the state there; 0, or 1 after an exception."""

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
                state.group.rendezvous.close(error)  # nobody waits on then; `fail` reports it
            return 1

    return answer


@functools.cache
def callbacks() -> tuple[int, int]:
    """Number and address of the C functions by which MXNet deletes an operator and runs its passes."""
    word = ctypes.c_int64
    native.provide("wait_on", answering(OperatorState.wait_on), *[word] * 3)
    native.provide("refuse", answering(OperatorState.refuse), *[word] * 2)
    native.provide("allreduce_processes", answering(OperatorState.allreduce_processes), *[word] * 4)
    native.provide("fail", answering(OperatorState.fail), *[word] * 4)
    names = "gp_delete", "gp_forward", "gp_backward"
    return 3, address_of(keep_after_end((ctypes.c_void_p * 3)(*map(native.address, names))))


def _names(*names: bytes) -> ctypes.Array:
    return (ctypes.c_char_p * (len(names) + 1))(*names, None)


_NAMES = keep_after_end((_names(b"data", b"gamma", b"beta"), _names(b"output"), _names(b"moving_mean", b"moving_var")))
_DEPENDENCIES = keep_after_end((ctypes.c_int * 4)(0, 1, 2, 4))  # dy, x, gamma, y; numbered are dy, x, gamma, beta, y


class _CustomOpProp:
    """MXNet's CustomOpProp for one set of attributes: names, shapes and types of its arrays."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        num_dependencies = 4 if settings.keeps_output else 3
        record = self._record = C.Description(address_of(_DEPENDENCIES), num_dependencies, settings.axis)
        self.address = address_of(record)
        self._deletion = deletion(_delete_prop, self.address)
        contexts = *map(address_of, (self._deletion, *_NAMES)), *[self.address] * (len(_FUNCTIONS) - 1 - len(_NAMES))
        self.contexts = (ctypes.c_void_p * len(contexts))(*contexts)


@keep_after_end
@ctypes.CFUNCTYPE(None, ctypes.c_int64)
def _delete_prop(address: int, props: dict = props) -> None:  # also when this module's names are gone
    del props[address]


# The C library calls it, see `load`.
def describe(num: int, keys: Any, values: Any, result: int) -> int:
    """Create the CustomOpProp for these attributes, and write its callbacks to `result`."""
    try:
        strings = {keys[i].decode(): values[i].decode() for i in range(num)}
        prop = _CustomOpProp(Settings(strings.pop("token"), **{key: attribute_value(strings[key]) for key in strings}))
        props[prop.address] = prop
        functions = load()
        set_callbacks(result, len(functions), address_of(functions), address_of(prop.contexts))
    except BaseException:  # KeyboardInterrupt too: a C callback cannot raise
        traceback.print_exc()
    return 0


def set_callbacks(result: int, num: int, functions: int, contexts: int) -> None:
    """Write the addresses of these arrays, which live on, into MXNet's list."""
    filled = C.CallbackList.from_address(result)
    filled.functions, filled.contexts = functions, contexts
    filled.num = num  # last, because the C library takes it for success


# The C library calls it, see `load`.
def create(device: bytes, num: int, shapes: Any, num_axes: Any, dtypes: Any, result: int, description: int) -> int:
    """Create the operator's state for one device, and write its callbacks to `result`."""
    try:
        settings, shape = props[description].settings, shapes[0][: num_axes[0]]
        group = settings.group()
        kinds = tuple(DTYPES[number] for number in dtypes[:num])
        kind, number = device.decode().rstrip(")").split("(")  # such as "gpu(1)"
        state = OperatorState.take(settings, group, mx.Context(kind, int(number)), shape, kinds)
        set_callbacks(result, *callbacks(), state.where)
    except BaseException:  # KeyboardInterrupt too: a C callback cannot raise
        traceback.print_exc()
    return 0


_FUNCTIONS = ("gp_delete", *["gp_list"] * len(_NAMES), "gp_infer_shape", "gp_declare_backward_dependency", "gp_create",
              "gp_infer_type")  # fmt: skip  # a CustomOpProp's, in MXNet's order


@functools.cache
def load() -> ctypes.Array:
    """Register the operator at the first call; returns the callbacks of a CustomOpProp."""
    word, strings, integers = ctypes.c_int64, ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_int)
    native.provide("describe", describe, word, strings, strings, word)
    native.provide("create", create, ctypes.c_char_p, word, ctypes.POINTER(integers), integers, integers, word, word)
    register_custom_operator(NAME, native.address("gp_describe"))
    return keep_after_end((ctypes.c_void_p * len(_FUNCTIONS))(*map(native.address, _FUNCTIONS)))


_arithmetic_in_memory = native.function("gp_arithmetic_in_memory", 2)
_arithmetic_of_operators = native.function("gp_arithmetic_of_operators", 0)
