"""Stand-ins for modules that MXNet imports and rarely uses; they took half of the time of its import."""

import contextlib
import importlib
import importlib.util
import re
import sys
import types
from typing import Any


class Deferred(types.ModuleType):
    """Stands for a module that is imported when one of its names is first used."""

    def __getattr__(self, name):
        if name.startswith("__"):  # what Python's import asks a module for
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


class _Sparse(Deferred):
    """scipy.sparse, with ``csr.csr_matrix``, which SciPy renamed and ``mx.nd.array`` compares each argument with."""

    @property
    def csr(self):
        """The old module, whose class matches nothing as long as nobody has imported SciPy's matrices."""
        return types.SimpleNamespace(csr_matrix=getattr(sys.modules.get("scipy.sparse"), "csr_matrix", ()))


def _version(text):
    """Stands for distutils' two classes, with which MXNet compares versions of NumPy."""
    return [int(number) for number in re.findall(r"\d+", text)[:3]]


_RARE = "mxnet.test_utils", "mxnet.onnx", "mxnet.contrib.onnx"  # modules of MXNet that few programs use


@contextlib.contextmanager
def for_mxnet():
    """MXNet is imported in here with the stand-ins; a module that is imported already is not replaced."""
    versions = types.ModuleType("distutils.version")
    vars(versions).update(LooseVersion=_version, StrictVersion=_version)
    # scikit-learn, with pandas, is the base of a model class that MXNet deprecated itself: here it is not installed.
    stand_ins: dict[str, Any] = {"sklearn": None, "distutils.version": versions}
    for name in ("requests", "scipy.sparse", "scipy.stats", "cv2"):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            stand_ins[name] = Deferred(name)
    for name in _RARE:
        stand_ins[name] = Deferred(name)
    stand_ins = {name: module for name, module in stand_ins.items() if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
    for name in _RARE:
        parent, _, child = name.rpartition(".")
        vars(sys.modules[parent]).setdefault(child, stand_ins.get(name))
    for name in ("mxnet.ndarray.sparse", "mxnet.ndarray.utils"):
        module: Any = sys.modules[name]
        module.spsp = module.spsp and _Sparse("scipy.sparse")


class _Distutils:
    """Finds distutils, which GluonCV imports and Python 3.12 removed, in setuptools' copy."""

    def find_spec(self, name, path=None, target=None):
        if name != "distutils":
            return None
        try:
            importlib.import_module("setuptools")  # which puts a finder of its own before this one
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"distutils, which Python {sys.version_info[0]}.{sys.version_info[1]} no longer has, comes with "
                "setuptools: pip install 'setuptools<85'"
            ) from error
        return importlib.util.find_spec("distutils")


def restore_distutils():
    """Make distutils importable on Python 3.12 and later, where setuptools has not done so."""
    if sys.version_info >= (3, 12) and not any(isinstance(finder, _Distutils) for finder in sys.meta_path):
        sys.meta_path.append(_Distutils())
