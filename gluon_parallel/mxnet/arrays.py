"""What an ``NDArray`` keeps to itself: its address in MXNet, and the mark that its gradient is fresh."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .compat import mx

UNDEFINED_STORAGE: int = mx.nd.ndarray._STORAGE_TYPE_UNDEFINED
DTYPES: dict[int, type] = mx.nd.ndarray._DTYPE_MX_TO_NP  # by their numbers in MXNet


def addresses_of(arrays: Iterable[mx.nd.NDArray]) -> list[int]:
    """What MXNet's C functions know these arrays by."""
    return [array.handle.value for array in arrays]


def swap(one: mx.nd.NDArray, other: mx.nd.NDArray) -> None:
    """Exchange what two arrays are in MXNet, with their memory and graphs: what holds one then has the other."""
    one.handle, other.handle = other.handle, one.handle


def is_fresh(value: mx.nd.NDArray) -> bool:
    """Whether a backward pass has written the gradient of this value since the mark was taken away."""
    return value._fresh_grad


def set_fresh(value: mx.nd.NDArray, fresh: bool) -> None:
    """Mark the gradient of this value as fresh, or as not; raises MXNetError if it has none."""
    value._fresh_grad = fresh


def copy_from_numpy(array: mx.nd.NDArray, values: np.ndarray) -> None:
    """Write values of the array's shape into it, and wait until they are there."""
    array._sync_copyfrom(values)


def has_graph(array: mx.nd.NDArray) -> bool:
    """Whether the array was computed from something that has a gradient."""
    try:
        set_fresh(array, False)  # which MXNet refuses otherwise
    except mx.base.MXNetError:
        return False
    return True


def multiply(array: mx.nd.NDArray, factor: float) -> None:
    """Multiply an array, also a row_sparse one, in place."""
    mx.nd._internal._mul_scalar(array, scalar=factor, out=array)
