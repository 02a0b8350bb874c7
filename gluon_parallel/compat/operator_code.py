"""Cache on disk of the compiled code of MXNet's operator functions.

MXNet writes the source of each of its 2,556 operator functions and compiles it anew at every import, which takes a
third of the import's time. This cache keeps the compiled code beside Python's own, in ``__pycache__``. Its keys are
digests of the sources, so an entry is always the code of the source that asks for it, whatever MXNet is installed.
"""

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import marshal
import os
import sys
import zlib
from typing import Any

_MODULES = ("mxnet.ndarray.register", "mxnet.symbol.register")  # which make the operator functions


class OperatorCode:
    """Compiled code by source, read from the file `path` and written there by :meth:`save`."""

    def __init__(self, path):
        self.path = path
        self._codes = _read(path)
        self._is_complete = True

    def execute(self, source, module_globals, namespace):
        """``exec(source, module_globals, namespace)`` for the `source` of one operator function.

        The last call in `source` passes the operator's address, a number that differs in each process. So the code is
        kept with ``...`` in its place.
        """
        head, _, call = source.rpartition("(")
        address, _, others = call.partition(",")
        source = f"{head}(...,{others}"
        key = hashlib.blake2b(source.encode(), digest_size=16).digest()
        code = self._codes.get(key)
        if code is None:
            code = self._codes[key] = compile(source, "<string>", "exec")
            self._is_complete = False
        exec(code, module_globals, namespace)
        (function,) = namespace.values()
        constants = tuple(int(address) if value is ... else value for value in function.__code__.co_consts)
        function.__code__ = function.__code__.replace(co_consts=constants)

    def save(self):
        """Write what was compiled, if anything was, unless the folder is read-only or Python shall write no code."""
        if self._is_complete or sys.dont_write_bytecode:
            return
        data = marshal.dumps(self._codes)
        temporary = f"{self.path}.{os.urandom(8).hex()}"
        with contextlib.suppress(OSError):  # as Python does with its own files: the next import compiles again
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            try:
                with open(temporary, "xb") as file:
                    file.write(_header(data) + data)
                os.replace(temporary, self.path)  # at once: other processes may be reading or writing it
            except OSError:
                os.unlink(temporary)
                raise


def _header(data):
    return importlib.util.MAGIC_NUMBER + zlib.crc32(data).to_bytes(4, "little")


def _read(path):
    try:
        with open(path, "rb") as file:
            header, data = file.read(len(_header(b""))), file.read()
    except OSError:
        return {}
    return marshal.loads(data) if header == _header(data) else {}


class _Finder:
    """Finds the modules that make the operator functions, and gives them an ``exec`` of their own."""

    def __init__(self, codes):
        self.codes = codes

    def find_spec(self, name, path, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in _MODULES else None
        if spec is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module):
                del loader.exec_module
                module.exec = lambda source, _, namespace: self.codes.execute(source, vars(module), namespace)
                run(module)

            loader.exec_module = exec_module
        return spec


@contextlib.contextmanager
def cached():
    """In here an import of MXNet takes its operators' code from the cache, and puts there what it did not find."""
    codes = OperatorCode(importlib.util.cache_from_source(__file__)[: -len("pyc")] + "operators")
    finder = _Finder(codes)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in _MODULES:
            if name in sys.modules:  # it is not, if the import failed before
                vars(sys.modules[name]).pop("exec", None)
    codes.save()
