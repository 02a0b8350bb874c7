"""MXNet's arrays as NumPy's: ``np.asarray`` and NumPy's functions read the values of an NDArray.

MXNet 1.9.1 left the conversion to Python's sequence protocol. Since NumPy 1.24 that fails, because an NDArray of one
element contains itself; ``np.array_equal`` then answers False without an error.
"""

import importlib
import types

import numpy as np


def _array(self, dtype=None, copy=None):
    """The values as a NumPy array, for NumPy's functions; always a copy."""
    if copy is False:
        raise ValueError("an NDArray's memory belongs to MXNet, so NumPy gets a copy; write np.asarray(array)")
    values = self.asnumpy()
    return values if dtype is None else values.astype(dtype, copy=False)


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
    recordio.cv2 = None if cv2 is None else types.SimpleNamespace(**{**vars(cv2), "imencode": imencode})


def convert():
    """Give the imported MXNet's NDArray NumPy's conversion method, and ``mxnet.recordio`` its ``tostring``."""
    importlib.import_module("mxnet.ndarray.ndarray").NDArray.__array__ = _array
    if not hasattr(np.ndarray, "tostring"):
        _restore_tostring(importlib.import_module("mxnet.recordio"))
