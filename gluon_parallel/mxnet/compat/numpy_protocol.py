"""MXNet's arrays in NumPy's functions: as arrays, whose values are read, and as dtypes.

MXNet left the conversion to Python's sequence protocol, which fails since NumPy 1.24. NumPy takes an object with an
attribute ``dtype`` for a dtype: an NDArray's is a class, which NumPy 2.3 refuses; 2.4 asks for ``__numpy_dtype__``
first.
"""

import importlib
import sys
import types
import warnings

import numpy as np

from .deferred import Deferred
from .replacing import stands_for


def _array(self, dtype=None, copy=None):
    """The values as a NumPy array, for NumPy's functions; always a copy."""
    if copy is False:
        raise ValueError("an NDArray's memory belongs to MXNet, so NumPy gets a copy; write np.asarray(array)")
    values = self.asnumpy()
    return values if dtype is None else values.astype(dtype, copy=False)


def _asscalar(self):
    """The value of an array of one element, with any number of axes, as a NumPy scalar."""
    if self.size != 1:
        raise ValueError("The current array is not a scalar")
    return self.asnumpy().reshape(())[()]


def _refuses_dtypes_of_objects():
    """Whether this NumPy (2.3) takes no object for a dtype whose attribute ``dtype`` is a class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy 1.20 to 2.2 announce the refusal
        try:
            np.dtype(types.SimpleNamespace(dtype=np.float32, __numpy_dtype__=np.dtype(np.float32)))
        except ValueError:
            return True
    return False


def _convert_dtypes_of(classes):
    """Have MXNet's functions take an object of one of these classes for a dtype, although NumPy refuses it."""

    def as_dtype(value):
        return value.dtype if isinstance(value, classes) else value

    def dtype(value, *args, **kwargs):
        return np.dtype(as_dtype(value), *args, **kwargs)

    def array(values, dtype=None, **kwargs):
        return np.array(values, dtype=as_dtype(dtype), **kwargs)

    namespace = types.ModuleType("numpy")
    vars(namespace).update({**vars(np), "dtype": dtype, "array": array})
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "mxnet"]:
        for name in [name for name, value in vars(module).items() if value is np]:
            setattr(module, name, namespace)


class _Bytes(np.ndarray):
    """An array with the method ``tostring``, which NumPy 2.3 removed; ``mxnet.recordio`` writes labels with it."""

    def tostring(self):
        """The array's memory."""
        return self.tobytes()


def _restore_tostring(recordio):
    def asarray(*args, **kwargs):
        return np.asarray(*args, **kwargs).view(_Bytes)

    def imencode(*args, **kwargs):
        done, data = cv2.imencode(*args, **kwargs)
        return done, data.view(_Bytes)

    cv2 = recordio.cv2
    recordio.np = types.SimpleNamespace(**{**vars(np), "asarray": asarray})
    if cv2 is not None:
        recordio.cv2 = Deferred("cv2")
        recordio.cv2.imencode = imencode


def convert():
    """Give the imported MXNet's classes NumPy's conversion methods, and ``mxnet.recordio`` its ``tostring``."""
    ndarray = importlib.import_module("mxnet.ndarray.ndarray")
    ndarray.NDArray.__array__ = _array
    # MXNet's leaves the axes, and NumPy 2.4 refuses float() of such an array.
    mended = stands_for(ndarray.NDArray.asscalar, ndarray.NDArray, "asscalar")
    ndarray.NDArray.asscalar = mended(_asscalar)
    classes = (ndarray.NDArray, importlib.import_module("mxnet.gluon.parameter").Parameter)
    for owner in classes:
        owner.__numpy_dtype__ = property(lambda self: np.dtype(self.dtype))
    if _refuses_dtypes_of_objects():
        _convert_dtypes_of(classes)
    if not hasattr(np.ndarray, "tostring"):
        _restore_tostring(importlib.import_module("mxnet.recordio"))
