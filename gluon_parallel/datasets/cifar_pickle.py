"""Read CIFAR-10's Python version, which is pickled, without letting the file choose what runs."""

import io
import pickle

import numpy as np

from ..errors import DatasetCorrupt


def read_pickled(content: bytes, where: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The images (N, size) and labels (N,), both uint8, that a pickled dictionary has as b"data" and b"labels".

    A pickle may name any function to be called. Here the three names that a NumPy array is made of lead to harmless
    stand-ins, which only keep the array's bytes; what names anything else, or is damaged, is a DatasetCorrupt.
    """
    try:
        batch = _unpickler(content).load()
        images, labels = batch[b"data"].array(size), np.array(batch[b"labels"])
    except Exception as error:  # a damaged pickle can fail in every way that Python knows
        raise DatasetCorrupt(
            f"{where}: not a file of CIFAR-10's Python version, or damaged ({type(error).__name__}: {error}); replace "
            "it by the published one"
        ) from error
    if labels.dtype.kind not in "iu" or labels.ndim != 1 or np.any((labels < 0) | (labels > 255)):
        raise DatasetCorrupt(f"{where}: its labels are not a list of small integers; replace it by the published one")
    return images, labels.astype(np.uint8)


def _unpickler(content):
    # Made anew for each file, so that a forged pickle that alters the stand-ins alters nobody else's.
    class DType:
        def __init__(self, code, *_):
            self.code = code

        def __setstate__(self, state):
            """Byte order and fields; single bytes have neither."""

    class Array:
        def __setstate__(self, state):
            _version, self.shape, self.dtype, self.fortran_order, self.content = state

        def array(self, size):
            if self.dtype.code not in (b"u1", "u1") or self.fortran_order or self.shape[1:] != (size,):
                raise ValueError(f"data of type {self.dtype.code!r} and shape {self.shape}, not (N, {size}) of bytes")
            return np.frombuffer(self.content, np.uint8).reshape(self.shape)

    def reconstruct(*_):
        return Array()

    class Unpickler(pickle._Unpickler):  # the one in C can be made to fill the memory by a forged number
        def find_class(self, module, name):
            known = {
                ("numpy.core.multiarray", "_reconstruct"): reconstruct,
                ("numpy", "ndarray"): Array,
                ("numpy", "dtype"): DType,
            }
            if (module, name) not in known:
                raise pickle.UnpicklingError(f"it wants to call {module}.{name}")
            return known[module, name]

    return Unpickler(io.BytesIO(content), encoding="bytes")  # Python 2 wrote these files
