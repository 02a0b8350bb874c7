"""MXNet's two classes of arrays, ``mx.nd.NDArray`` and ``mx.np.ndarray``, behind one set of functions.

After ``mx.npx.set_np()`` parameters, outputs and losses are ``mx.np`` arrays, which MXNet's legacy operators refuse.
Both classes are handles of the same memory and carry the same history of autograd, so converting costs no copy.
"""

import numpy as np

from .compat import mx

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])  # what MXNet calls it; NumPy has none


def as_legacy(array):
    """The same array as ``mx.nd.NDArray``, which every operator in ``mx.nd`` takes; no copy.

    Example:
        >>> type(as_legacy(mx.np.ones(2))) is mx.nd.NDArray
        True
    """
    return array.as_nd_ndarray()


def as_current(array):
    """The same array as ``mx.np.ndarray`` after ``mx.npx.set_np()``, as ``mx.nd.NDArray`` before; no copy.

    Example:
        >>> type(as_current(mx.nd.ones(2))) is mx.nd.NDArray
        True
    """
    return array.as_np_ndarray() if mx.util.is_np_array() else array.as_nd_ndarray()


def as_class_of(array, like):
    """The same array in the class of `like`; no copy."""
    return array.as_np_ndarray() if isinstance(like, mx.np.ndarray) else array.as_nd_ndarray()


def to_device(array, device):
    """`array` on `device`, itself if it is there already; of its own class."""
    return array.as_in_ctx(device) if isinstance(array, mx.np.ndarray) else array.as_in_context(device)


def set_zero(array):
    """Set every value of a dense or ``row_sparse`` array of any shape to 0; do not wait."""
    as_legacy(array)[:] = 0  # mx.np arrays of no dimension refuse the colon
