"""Command `run`: start an unchanged script, or a module, as Python does."""

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import types

from ..environment import MIN_PROCESSES
from ..launch import add_script_arguments as configure  # noqa: F401 - the command's
from ..native import repair_open_mpi
from ..nn import replace_contrib
from .cli import ArgumentError
from .profile import profile_if_requested


class ScriptName(str):
    """``sys.argv[0]`` of a script under `run`: a string that brings gluon_parallel along wherever it is unpickled.

    A process that multiprocessing *spawns* gets ``sys.argv`` pickled, before it imports the script again. Unpickling
    this name imports gluon_parallel, so the script's own ``import mxnet`` works there as well.
    """

    __slots__ = ()


def run_script(path, arguments=()):
    """Run the Python file `path` as ``python path arguments...`` would, in this process.

    The script is ``__main__``, and stays it: what it pickles, its ``sys.argv``, ``sys.path[0]`` and ``__file__`` are as
    if Python had started it. Its exceptions and ``sys.exit`` pass through.
    """
    file_name = os.path.abspath(path)
    with io.open_code(file_name) as file:
        code = compile(file.read(), file_name, "exec", dont_inherit=True)  # bytes, so that a coding cookie is obeyed
    loader = importlib.machinery.SourceFileLoader("__main__", file_name)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    _run_as_main(code, [path, *arguments], __file__=file_name, __loader__=loader, __cached__=None)


def find_module(name):
    """The specification of the module that ``python -m name`` runs, ``name.__main__`` for a package.

    ArgumentError: there is none, or it is no Python code.
    """
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:  # of the package around it
        raise ArgumentError(f"module {name!r} cannot be imported: {error}") from error
    if spec is None:
        raise ArgumentError(f"there is no module {name!r}, neither in {os.getcwd()} nor installed in {sys.prefix}")
    if getattr(spec.loader, "get_code", lambda name: None)(spec.name) is None:
        raise ArgumentError(f"module {name!r} is no Python code; name a module that is a Python file")
    return spec


def run_module(spec, arguments=()):
    """Run what :func:`find_module` found as ``python -m name arguments...`` would, see :func:`run_script`."""
    about = {"__spec__": spec, "__package__": spec.parent, "__file__": spec.origin, "__cached__": spec.cached}
    _run_as_main(spec.loader.get_code(spec.name), [spec.origin, *arguments], __loader__=spec.loader, **about)


def _run_as_main(code, argv, **attributes):
    script = types.ModuleType("__main__")
    vars(script).update(__builtins__=builtins, **attributes)
    sys.argv[:] = [ScriptName(argv[0]), *argv[1:]]
    sys.modules["__main__"] = script
    exec(code, vars(script))


def main(options):
    """Run the script. ArgumentError: it cannot be read; what it raises passes through."""
    if options.sync_batch_norm == "ours":
        replace_contrib()
    if MIN_PROCESSES in os.environ:
        repair_open_mpi()  # now: the script may import mpi4py before it makes a store
    try:
        if options.module:
            spec = find_module(options.script)
        else:
            with open(options.script, "rb"):
                pass
    except OSError as error:
        raise ArgumentError(f"{options.script!r} cannot be read: {error.strerror}; name a file") from error
    with profile_if_requested():
        if options.module:
            run_module(spec, options.arguments)
        else:
            run_script(options.script, options.arguments)
