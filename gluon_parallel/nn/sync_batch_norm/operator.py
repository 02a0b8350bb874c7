"""The custom operator: what MXNet's graphs say of it, its description, and its instances."""

from __future__ import annotations

import ctypes
import traceback
from types import ModuleType
from typing import Any, NamedTuple

from ...compat import mx
from ...engine.compiled.records import Record, address_of
from ...engine.ending import keep_after_end
from ...errors import BarrierBroken
from ..rewrite_graph import attribute_value
from . import sync_group
from .operator_state import OperatorState, deletion, passes

NAME = "gluon_parallel_sync_batch_norm"


class Description(Record):
    """What the compiled functions of `compiled.description` read."""

    arguments: int  # addresses of names
    outputs: int
    auxiliary_states: int
    dependencies: int  # address of the numbers of what the backward pass reads
    axis: int  # of the channels


class CallbackList(Record):
    """MXNet's structure of that name: how it calls a description, or an instance."""

    num: int
    functions: int  # address of their addresses
    contexts: int  # address of what they are called with


class Settings(NamedTuple):
    """The operator's attributes, which travel through MXNet as strings: BatchNorm's, and the sync group's token."""

    token: str
    axis: int = 1
    eps: float = 1e-3
    momentum: float = 0.9
    fix_gamma: bool = True
    use_global_stats: bool = False

    @classmethod
    def parse(cls, strings: dict[str, str]) -> Settings:
        """Settings from MXNet's strings.

        Example:
            >>> Settings.parse({"token": "t", "axis": "-1", "fix_gamma": "True"}).axis
            -1
        """
        values: dict[str, Any] = {
            name: text if name == "token" else attribute_value(text) for name, text in strings.items()
        }
        return cls(**values)

    def group(self) -> sync_group.SyncGroup:
        """The layer's sync group.

        Raises:
            BarrierBroken: the layer is gone, or lived in another process.
        """
        group = sync_group.find(self.token)
        if group is None:
            raise BarrierBroken(
                "this graph was made by a SyncBatchNorm layer that no longer exists here; keep the net alive while it "
                "is used, or use gp.nn.revert_sync_batchnorm(net) before you take its graph elsewhere"
            )
        return group


def _names(*names: bytes) -> ctypes.Array:
    return (ctypes.c_char_p * (len(names) + 1))(*names, None)


_LISTS = keep_after_end({
    "arguments": _names(b"data", b"gamma", b"beta"), "outputs": _names(b"output"),
    "auxiliary_states": _names(b"moving_mean", b"moving_var"),
    "dependencies": (ctypes.c_int * 3)(0, 1, 2),  # dy, x and gamma, of dy; x, gamma, beta; y
})  # fmt: skip

_descriptions: dict[int, Any] = keep_after_end({})  # by address, as long as MXNet has them


class _Description:
    """What MXNet knows of the operator with these settings before it makes an instance: shapes, types, names."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        record = self._record = Description(axis=settings.axis)
        self.address = address_of(record)
        self._deletion = deletion(_forget, self.address)
        for name, values in _LISTS.items():
            setattr(record, name, address_of(values))
        others = [self.address] * (len(load().CALLBACKS) - 1)
        self.contexts = (ctypes.c_void_p * (1 + len(others)))(address_of(self._deletion), *others)


@ctypes.CFUNCTYPE(None, ctypes.c_int64)
def _forget(address: int) -> None:
    del _descriptions[address]


def _answer(result: int, functions: ctypes.Array, contexts: ctypes.Array) -> None:
    """Give MXNet these arrays, which live on; `num` is written last, because compiled code takes it for success."""
    callbacks = CallbackList.from_address(result)
    callbacks.functions, callbacks.contexts = address_of(functions), address_of(contexts)
    callbacks.num = len(functions)


# The next two answer what compiled code asks, see `compiled.c_functions`.


def describe(num: int, keys: Any, values: Any, result: int) -> int:
    """MXNet wants a description for these attributes."""
    try:
        description = _Description(Settings.parse({keys[i].decode(): values[i].decode() for i in range(num)}))
        _descriptions[description.address] = description
        _answer(result, load().CALLBACKS, description.contexts)
    except BaseException:  # also Ctrl-C: nothing else would tell of it
        traceback.print_exc()
    return 0


def create(device: bytes, num: int, shapes: Any, num_axes: Any, dtypes: Any, result: int, description: int) -> int:
    """MXNet wants an instance for one device: its state, and what to call with it."""
    try:
        settings, shape = _descriptions[description].settings, shapes[0][: num_axes[0]]
        kinds = tuple(mx.nd.ndarray._DTYPE_MX_TO_NP[number] for number in dtypes[:num])
        state = OperatorState.take(settings, settings.group(), _context_of(device.decode()), shape, kinds)
        _answer(result, passes().CALLBACKS, state.contexts)
    except BaseException:  # as above
        traceback.print_exc()
    return 0


def _context_of(name: str) -> mx.Context:
    """The ``mx.Context`` that MXNet calls, for instance, "gpu(1)"."""
    kind, number = name.rstrip(")").split("(")
    return mx.Context(kind, int(number))


def load() -> ModuleType:
    """The module of the compiled callbacks; loading it, which takes time, makes the operator known to MXNet."""
    from .compiled import description as module

    return module
