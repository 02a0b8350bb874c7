"""MXNet's arrays as NumPy's: ``np.asarray`` and NumPy's functions read the values of an NDArray.

MXNet 1.9.1 left the conversion to Python's sequence protocol. Since NumPy 1.24 that fails, because an NDArray of one
element contains itself; ``np.array_equal`` then answers False without an error.
"""

import importlib


def _array(self, dtype=None, copy=None):
    """The values as a NumPy array, for NumPy's functions; always a copy."""
    if copy is False:
        raise ValueError("an NDArray's memory belongs to MXNet, so NumPy gets a copy; write np.asarray(array)")
    values = self.asnumpy()
    return values if dtype is None else values.astype(dtype, copy=False)


def convert():
    """Give the NDArray of the imported MXNet NumPy's conversion method."""
    importlib.import_module("mxnet.ndarray.ndarray").NDArray.__array__ = _array
