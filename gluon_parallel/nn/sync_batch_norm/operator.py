"""The custom operator: what MXNet's graphs say of it, its description, and its instances."""

import ctypes
import traceback
from typing import Any, NamedTuple

import numpy as np

from ...compat import mx
from ...engine.ending import keep_after_end
from ...engine.pthread import address_of
from ...errors import BarrierBroken
from ..rewrite_graph import attribute_value
from . import sync_group
from .operator_state import OperatorState, deletion, passes

NAME = "gluon_parallel_sync_batch_norm"

# What the compiled functions of `compiled.description` read.
DESCRIPTION = np.dtype([
    ("deletion", "i8", (3,)),  # the first field: `delete` gets this record's address, as all of them do
    ("arguments", "i8"), ("outputs", "i8"), ("auxiliary_states", "i8"),  # addresses of names
    ("dependencies", "i8"),  # address of the numbers of what the backward pass reads
    ("axis", "i8"),  # of the channels
])  # fmt: skip


class Settings(NamedTuple):
    """The operator's attributes, which travel through MXNet as strings: BatchNorm's, and the sync group's token."""

    token: str
    axis: int = 1
    eps: float = 1e-3
    momentum: float = 0.9
    fix_gamma: bool = True
    use_global_stats: bool = False

    @classmethod
    def parse(cls, strings):
        """Settings from MXNet's strings.

        Example:
            >>> Settings.parse({"token": "t", "axis": "-1", "fix_gamma": "True"}).axis
            -1
        """
        return cls(**{name: text if name == "token" else attribute_value(text) for name, text in strings.items()})

    def group(self):
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


def _names(*names):
    return (ctypes.c_char_p * (len(names) + 1))(*names, None)


_LISTS = keep_after_end({
    "arguments": _names(b"data", b"gamma", b"beta"), "outputs": _names(b"output"),
    "auxiliary_states": _names(b"moving_mean", b"moving_var"),
    "dependencies": (ctypes.c_int * 3)(0, 1, 2),  # dy, x and gamma, of dy; x, gamma, beta; y
})  # fmt: skip

_descriptions: dict[int, Any] = keep_after_end({})  # by address, as long as MXNet has them


class _Description:
    """What MXNet knows of the operator with these settings before it makes an instance: shapes, types, names."""

    def __init__(self, settings):
        self.settings = settings
        record = self._record = np.zeros(1, DESCRIPTION)
        self.address = address_of(record)
        record["deletion"], record["axis"] = deletion(_forget, self.address), settings.axis
        for name, values in _LISTS.items():
            record[name] = ctypes.addressof(values)
        callbacks = load().CALLBACKS
        self._contexts = (ctypes.c_void_p * len(callbacks))(*[self.address] * len(callbacks))
        self.callbacks = _callback_list(callbacks, self._contexts)


@ctypes.CFUNCTYPE(None, ctypes.c_int64)
def _forget(address):
    del _descriptions[address]


def _callback_list(functions, contexts):
    """What MXNet takes; both arrays live on."""
    kinds = ctypes.POINTER(ctypes.CFUNCTYPE(ctypes.c_int)), ctypes.POINTER(ctypes.c_void_p)
    return mx.base.MXCallbackList(len(functions), ctypes.cast(functions, kinds[0]), ctypes.cast(contexts, kinds[1]))


_integer, _strings, _integers = ctypes.c_int64, ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_int)
_result = ctypes.POINTER(mx.base.MXCallbackList)


# The next two are called by the compiled functions of the same names, which tell a success by what is in `result`.


@ctypes.CFUNCTYPE(None, _integer, _strings, _strings, _result)
def describe(num, keys, values, result):
    """MXNet wants a description for these attributes."""
    try:
        description = _Description(Settings.parse({keys[i].decode(): values[i].decode() for i in range(num)}))
        _descriptions[description.address] = description
        result[0] = description.callbacks
    except BaseException:  # also Ctrl-C: nothing else would tell of it
        traceback.print_exc()


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, _integer, ctypes.POINTER(_integers), _integers, _integers, _result, _integer)
def create(device, num, shapes, num_axes, dtypes, result, description):
    """MXNet wants an instance for one device: its state, and what to call with it."""
    try:
        settings, shape = _descriptions[description].settings, shapes[0][: num_axes[0]]
        kinds = tuple(mx.nd.ndarray._DTYPE_MX_TO_NP[number] for number in dtypes[:num])
        state = OperatorState.take(settings, settings.group(), _context_of(device.decode()), shape, kinds)
        result[0] = _callback_list(passes().CALLBACKS, state.contexts)
    except BaseException:  # as above
        traceback.print_exc()


def _context_of(name):
    """The ``mx.Context`` that MXNet calls, for instance, "gpu(1)"."""
    kind, number = name.rstrip(")").split("(")
    return mx.Context(kind, int(number))


def load():
    """The module of the compiled callbacks; loading it, which takes time, makes the operator known to MXNet."""
    from .compiled import description as module

    return module
