"""Cache on disk of MXNet's operator functions.

At every import MXNet writes and compiles the source of 2,556 functions, which takes half of the import's time. This
cache keeps their code and docstrings beside Python's own, in ``__pycache__``. For the files of another MXNet it is
written anew.
"""

import contextlib
import functools
import importlib.util
import marshal
import os
import sys
import types
import zlib

from .after_import import Change, Changing

_INITIALIZERS = ("_init_op_module", "_init_np_op_module")  # of mxnet.base: they ask for one function after the other
_SOURCES = ("base.py", "ndarray/register.py", "symbol/register.py")  # what the functions depend on, and the library


class OperatorFunctions:
    """Functions by operator, read from the file `path` if it was written for the same `stamp`, and written there."""

    def __init__(self, path, stamp):
        self.path, self.stamp = path, stamp
        self._kept = _read(path, stamp)
        self._is_complete = True

    def by(self, make):
        """MXNet's function `make`, ``(handle, name, func_name) -> function``; it is called for what is not kept."""
        if self._kept is None:
            return make

        namespace = make.__globals__

        def kept(handle, name, func_name):
            key = f"{make.__module__} {name} {func_name}"
            if key not in self._kept:
                self._is_complete = False
                function = make(handle, name, func_name)
                # The address of the operator is a constant of the code, a number that differs in each process.
                constants = _replaced(function.__code__.co_consts[1:], handle.value, ...)
                code = function.__code__.replace(co_consts=(None, *constants))  # the first one is the docstring
                defaults = _replaced(function.__defaults__ or (), namespace["_Null"], ...)  # the others are None
                self._kept[key] = code, defaults, function.__doc__
            code, defaults, document = self._kept[key]
            code = code.replace(co_consts=_replaced(code.co_consts, ..., handle.value))
            function = types.FunctionType(code, namespace, None, _replaced(defaults, ..., namespace["_Null"]))
            function.__doc__ = document
            return function

        return kept

    def save(self):
        """Write what was made, if anything was, unless the folder is read-only or Python shall write no code."""
        kept, self._kept = self._kept, None  # MXNet makes functions also when it loads a library of operators
        if self._is_complete or sys.dont_write_bytecode:
            return
        data = marshal.dumps(kept)
        temporary = f"{self.path}.{os.urandom(8).hex()}"
        with contextlib.suppress(OSError):  # as Python does with its own files: the next import makes them again
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            try:
                with open(temporary, "xb") as file:
                    file.write(_header(self.stamp, data) + data)
                os.replace(temporary, self.path)  # at once: other processes may be reading or writing it
            except OSError:
                os.unlink(temporary)
                raise


def _replaced(values, old, new):
    return tuple(new if value == old else value for value in values)


def _header(stamp, data):
    return importlib.util.MAGIC_NUMBER + b"".join(
        zlib.crc32(part).to_bytes(4, "little") for part in (marshal.dumps(stamp), data)
    )


def _read(path, stamp):
    try:
        with open(path, "rb") as file:
            header, data = file.read(len(_header(stamp, b""))), file.read()
    except OSError:
        return {}
    return marshal.loads(data) if header == _header(stamp, data) else {}


def _ask(functions):
    """A function that gives the module ``mxnet.base`` initializers that ask the cache."""

    def change(module):
        for initializer in _INITIALIZERS:
            setattr(module, initializer, _asking(getattr(module, initializer), functions))

    return change


def _asking(initialize, functions):
    @functools.wraps(initialize)
    def initialize_by_cache(*names, make_op_func=None, **named):
        if make_op_func is None:
            make_op_func, names = names[-1], names[:-1]
        return initialize(*names, make_op_func=functions.by(make_op_func), **named)

    return initialize_by_cache


@contextlib.contextmanager
def cached(folder):
    """In here an import of the MXNet in `folder` takes its operators' functions from the cache, or puts them there."""
    library = os.environ.get("MXNET_LIBRARY_PATH") or "libmxnet.so"
    paths = [os.path.join(folder, name) for name in (library, *_SOURCES)]
    stamp = tuple((os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths if os.path.exists(path))
    functions = OperatorFunctions(importlib.util.cache_from_source(__file__)[: -len("pyc")] + "operators", stamp)
    change = Change(None, _ask(functions))
    finder = Changing({"mxnet.base": change})
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
    functions.save()
