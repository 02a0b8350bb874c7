"""C functions of MXNet: those that are called or replaced from elsewhere, and their errors."""

from __future__ import annotations

import ctypes
from typing import Any, Callable

from .compat import mx

_LIB = mx.base._LIB
# Raises MXNet's error where a C function did not return 0
check_call: Callable[[int], None] = mx.base.check_call


def last_error() -> Exception:
    """What MXNet says of the last C function that failed in this thread."""
    return mx.base.MXNetError(mx.base.py_str(_LIB.MXGetLastError()))


def replace_c_function(name: str, function: Any) -> None:
    """Have MXNet's Python code call `function`, of the C library, in the place of its own."""
    setattr(_LIB, name, function)


def operator_handle(name: str) -> Any:
    """What MXNet's C functions know an operator by."""
    handle = mx.base.OpHandle()
    check_call(_LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
    return handle


def register_custom_operator(name: str, describe: int) -> None:
    """Register a custom operator; `describe` is the address of the C function that describes it."""
    check_call(_LIB.MXCustomOpRegister(name.encode(), ctypes.c_void_p(describe)))


def free_store(handle: Any) -> None:
    """Free the store of MXNet with this handle."""
    check_call(_LIB.MXKVStoreFree(handle))


def set_num_threads(num: int) -> None:
    """Have operators on CPUs that are launched in this thread of the engine use so many threads."""
    _LIB.MXSetNumOMPThreads(num)
