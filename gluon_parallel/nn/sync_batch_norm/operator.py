"""Custom operator of SyncBatchNorm: its attributes, its CustomOpProp, and the creation of one CustomOp per device."""

from __future__ import annotations

import ctypes
import functools
import traceback
from typing import Any, NamedTuple

from ... import native
from ...compat import mx
from ...errors import BarrierBroken
from ...native import keep_after_end
from ...native.records import C, address_of
from ..rewrite_graph import attribute_value
from . import sync_group
from .operator_state import create, deletion, props, set_callbacks

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
        prop = _CustomOpProp(Settings.parse({keys[i].decode(): values[i].decode() for i in range(num)}))
        props[prop.address] = prop
        functions = load()
        set_callbacks(result, len(functions), address_of(functions), address_of(prop.contexts))
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
    mx.base.check_call(mx.base._LIB.MXCustomOpRegister(NAME.encode(), ctypes.c_void_p(native.address("gp_describe"))))
    return keep_after_end((ctypes.c_void_p * len(_FUNCTIONS))(*map(native.address, _FUNCTIONS)))
