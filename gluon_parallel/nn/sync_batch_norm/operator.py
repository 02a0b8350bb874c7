"""The custom operator: how MXNet is told its shapes, and given compiled passes for each instance."""

import ctypes
import threading
import traceback
from typing import NamedTuple

import numpy as np

from ...compat import mx
from ...engine.ending import keep_after_end
from ...engine.pthread import address_of
from ...errors import BarrierBroken
from ..rewrite_graph import attribute_value
from . import sync_group
from .operator_state import OperatorState, deletion, passes

NAME = "gluon_parallel_sync_batch_norm"
_DESCRIBED = f"{NAME}_description"
_DELETE, _CREATE_OPERATOR = 0, 6  # of the callbacks by which MXNet knows an operator

_integer, _address, _callbacks = ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(mx.base.MXCallbackList)
_strings, _integers = ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_int)
_Describe = ctypes.CFUNCTYPE(_integer, ctypes.c_char_p, _integer, _strings, _strings, _callbacks)
_Create = ctypes.CFUNCTYPE(
    _integer, ctypes.c_char_p, _integer, ctypes.POINTER(_integers), _integers, _integers, _callbacks, _address
)
_Function = ctypes.CFUNCTYPE(_integer)

# MXNet's Python frontend makes a description and returns nothing but C functions; so it is left here, to its thread.
_made = threading.local()


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


@mx.operator.register(_DESCRIBED)
class _Description(mx.operator.CustomOpProp):
    """Shapes and types, which MXNet asks for before it makes an instance."""

    def __init__(self, **settings):
        super().__init__(need_top_grad=True)
        self.settings = Settings.parse(settings)
        self.create = _Create(self._create)
        _made.description = self

    def list_arguments(self):
        return ["data", "gamma", "beta"]

    def list_auxiliary_states(self):
        return ["moving_mean", "moving_var"]

    def infer_shape(self, in_shape):
        data = in_shape[0]
        if not data:
            return in_shape, [data], [[], []]
        channels = [data[self.settings.axis]]
        return [data, channels, channels], [[1, *data]], [channels, channels]  # the 1: see `graph`

    def infer_type(self, in_type):
        data, *parameters = in_type
        wide = np.float32 if data == np.float16 else data
        parameters = [wide if kind is None else kind for kind in parameters]
        return [data, *parameters], [data], parameters

    def declare_backward_dependency(self, out_grad, in_data, out_data):
        return [out_grad[0], in_data[0], in_data[1]]

    def _create(self, device, num, shapes, num_dimensions, dtypes, result, _context):
        """MXNet wants an instance for one device: its state, and what to call with it."""
        try:
            shape = shapes[0][: num_dimensions[0]]
            kinds = tuple(mx.nd.ndarray._DTYPE_MX_TO_NP[number] for number in dtypes[:num])
            state = OperatorState.take(self.settings, self.settings.group(), _context_of(device.decode()), shape, kinds)
            functions = ctypes.cast(passes().CALLBACKS, ctypes.POINTER(_Function))
            result[0] = mx.base.MXCallbackList(3, functions, ctypes.cast(state.contexts, ctypes.POINTER(_address)))
            return 1
        except BaseException:  # also Ctrl-C: MXNet takes no exception, and anything but 0 for a success
            traceback.print_exc()
            return 0


def _context_of(name):
    """The ``mx.Context`` that MXNet calls, for instance, "gpu(1)"."""
    kind, number = name.rstrip(")").split("(")
    return mx.Context(kind, int(number))


# The description is MXNet's Python frontend's work; only instances are ours, for the frontend's would call Python.
_describe_in_python = mx.operator._registry.ref_holder[mx.operator._registry.counter - 1]  # of the one registered last


# What MXNet gets where a description cannot be made, and deletes all the same.
_FAILED = mx.base.MXCallbackList(
    1, (_Function * 1)(ctypes.cast(ctypes.CFUNCTYPE(_integer, _address)(lambda _: 1), _Function)), (_address * 1)()
)


@_Describe
def _describe(_name, num, keys, values, result):
    try:
        result[0] = _FAILED
        _describe_in_python(_DESCRIBED.encode(), num, keys, values, result)  # after an exception its status is anything
        if result[0].num_callbacks == _FAILED.num_callbacks:
            return 0
        description, callbacks = _made.description, result[0].callbacks
        callbacks[_CREATE_OPERATOR] = ctypes.cast(description.create, _Function)
        description.deletion = deletion(callbacks[_DELETE], 0)
        callbacks[_DELETE] = ctypes.cast(passes().CALLBACKS[0], _Function)
        result[0].contexts[_DELETE] = address_of(description.deletion)
        return 1
    except BaseException:  # as above
        traceback.print_exc()
        return 0


keep_after_end(mx.operator._registry.ref_holder)  # the descriptions, with what `delete` reads
mx.base.check_call(mx.base._LIB.MXCustomOpRegister(NAME.encode(), _describe))
