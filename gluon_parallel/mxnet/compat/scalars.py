"""NumPy scalars as parameters of MXNet's operators, which write parameters as text for the C++ library.

Since NumPy 2, ``str((np.int64(3), 4))`` is ``"(np.int64(3), 4)"``, which MXNet's library cannot read.
"""

import functools
import importlib
import json
import pkgutil
import types

import numpy as np

from .replacing import stands_for

# Modules whose every use of ``str`` writes a parameter: operators, cached graphs, symbols, and the C++ data iterators.
_WRITERS = ("mxnet._ctypes.ndarray", "mxnet._ctypes.symbol", "mxnet.io.io")
# Functions that refuse a NumPy integer where they take an int, or compare it with a tuple.
_FUNCTIONS = {
    "mxnet.ndarray": ("empty", "split_v2"),
    "mxnet.ndarray.numpy": ("full",),
    "mxnet.ndarray.numpy.linalg": ("norm",),
    "mxnet.symbol.numpy": ("full",),
    "mxnet.symbol.symbol": ("var", "Variable"),
    "mxnet.symbol": ("var", "Variable", "split_v2"),
    "mxnet.random": ("seed",),
    "mxnet.gluon.parameter:Parameter": ("__init__",),
    "mxnet.symbol.symbol:Symbol": ("__getitem__",),
}
_RANDOM = (
    "mxnet.ndarray.numpy.random", "mxnet.ndarray.numpy_extension.random",
    "mxnet.symbol.numpy.random", "mxnet.symbol.numpy_extension.random",
)  # fmt: skip


def plain(value):
    """`value` with NumPy scalars replaced by Python's numbers, also inside lists and tuples; others as they are.

    Example:
        >>> plain((np.int64(3), [np.float32(0.1), None], np.bool_(True)))
        (3, [0.1, None], True)
    """
    if isinstance(value, np.floating):
        return float(str(value))  # np.float32(0.1) gives 0.1, not 0.10000000149
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (tuple, list):
        return type(value)(plain(item) for item in value)
    return value


def text(value):
    """A parameter as MXNet's library reads it: as ``str``, with NumPy scalars written as numbers.

    Example:
        >>> text((np.int64(3), None)), text(np.float32(0.5)), text("relu")
        ('(3, None)', '0.5', 'relu')
    """
    written = str(value)
    if "np." in written and isinstance(value, (tuple, list)):
        return str(plain(value))
    return written


def _with_plain_arguments(function, owner, name):
    @stands_for(function, owner, name)
    def with_plain_arguments(*args, **kwargs):
        return function(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})

    return with_plain_arguments


def accept():
    """Have the imported MXNet take NumPy scalars for parameters; does nothing when called again."""
    for name in _WRITERS if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else ():
        vars(importlib.import_module(name))["str"] = text  # hides Python's own in that module
    functions = {**_FUNCTIONS, **{name: importlib.import_module(name).__all__ for name in _RANDOM}}
    for path, names in functions.items():
        owner = pkgutil.resolve_name(path)
        for name in names:
            function = getattr(owner, name)
            if isinstance(function, types.FunctionType) and not hasattr(function, "__wrapped__"):
                setattr(owner, name, _with_plain_arguments(function, owner, name))
    # Symbols keep initializers in their attributes, as JSON.
    dumps = functools.partial(json.dumps, default=plain)
    vars(importlib.import_module("mxnet.initializer"))["json"] = types.SimpleNamespace(dumps=dumps, loads=json.loads)
