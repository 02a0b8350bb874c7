"""MXNet's two classes of arrays, ``mx.nd.NDArray`` and ``mx.np.ndarray``, behind one set of functions.

After ``mx.npx.set_np()`` parameters, outputs and losses are ``mx.np`` arrays, which MXNet's legacy operators refuse.
Both classes are handles of the same memory and carry the same history of autograd, so converting costs no copy.
"""

from typing import Any

import numpy as np

from . import mx

Nested = Any  # an array of MXNet or NumPy, or a tuple, list or dict of such, which may be nested

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])  # what MXNet calls it; NumPy has none


def widened(values):
    """A NumPy array as one in which it is added: halves as float32, others as they are."""
    if values.dtype == BFLOAT16:
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if values.dtype == np.float16 else values


def narrowed(values, dtype):
    """A float32 NumPy array as float16 or bfloat16, rounded to the nearest value (of two to the even one).

    What is too large becomes infinite, and NaN stays NaN.
    """
    if dtype != BFLOAT16:
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0  # whose bits the sum may have carried over
    return rounded.view(BFLOAT16)


def as_legacy(array):
    """The same array as ``mx.nd.NDArray``, which every operator in ``mx.nd`` takes; no copy."""
    return array.as_nd_ndarray()


def as_current(array):
    """The same array as ``mx.np.ndarray`` after ``mx.npx.set_np()``, as ``mx.nd.NDArray`` before; no copy."""
    return array.as_np_ndarray() if mx.util.is_np_array() else array.as_nd_ndarray()


def as_class_of(array, like):
    """The same array in the class of `like`; no copy."""
    return array.as_np_ndarray() if isinstance(like, mx.np.ndarray) else array.as_nd_ndarray()


def as_tuple(data):
    """The members of a tuple or list, or the one array that stands in its place, as a tuple."""
    return tuple(data) if isinstance(data, (tuple, list)) else (data,)


def to_device(array, device):
    """`array` on `device`, itself if it is there already; of its own class."""
    return array.as_in_ctx(device) if isinstance(array, mx.np.ndarray) else array.as_in_context(device)


def leaves(data, where="data"):
    """Yield (where, leaf) for everything in nested tuples, lists and dicts that is none of these itself.

    Example:
        >>> list(leaves(({"a": 1}, [2])))
        [("data[0]['a']", 1), ('data[1][0]', 2)]
    """
    if not isinstance(data, (tuple, list, dict)):
        yield where, data
        return
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield from leaves(value, f"{where}[{key!r}]")


def set_zero(array):
    """Set every value of a dense or ``row_sparse`` array of any shape to 0; do not wait.

    A ``row_sparse`` one then has no rows; with rows of zeros, lazy updates would move weights that nothing reached.
    """
    if array.stype == "row_sparse":
        mx.nd.sparse.zeros("row_sparse", array.shape, ctx=array.context, dtype=array.dtype).copyto(array)
        return
    as_legacy(array)[:] = 0  # mx.np arrays of no dimension refuse the colon
