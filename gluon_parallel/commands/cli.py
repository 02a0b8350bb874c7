"""Command line: reads which command is named; and command `run`, which starts an unchanged script."""

import argparse
import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import types
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional

from ..errors import ConfigError
from . import profile

INTERRUPTED = 130  # the exit status after Ctrl-C, as in shells

HELP = {  # of each word after `gluon-parallel`; here, because `gluon-parallel --help` must work without MXNet
    "run": "Run a script that knows only MXNet, and make MXNet importable for it.",
    "launch": "Run one script as several processes, on one host or on many, and end them together.",
    "profile": "Run a script, or launch it, and show where the time of its training steps goes.",
    "parity": "Train some steps on 1 x 1, D x 1 and D x P (devices x processes); fail if the weights differ.",
    "estimate": "Estimate memory, exchanged bytes and efficiency of a training without running it.",
    "doctor": "Check this machine and installation, and name what cures it; exit status 0 if nothing has failed.",
}


class Command(NamedTuple):
    """One word after ``gluon-parallel``, a key of `HELP`; ``__main__`` has the list of all."""

    name: str
    configure: Callable[[argparse.ArgumentParser], Any]  # adds the command's arguments to its parser
    main: Callable[[argparse.Namespace], Optional[int]]  # does the work; what it returns is the exit status


def main(commands: Sequence[Command], argv: Optional[Sequence[str]] = None) -> int:
    """Read the command line and run the one command that it names; returns the exit status for the shell.

    Example:
        >>> main([Command("run", lambda parser: None, lambda options: print("hello"))], ["run"])
        hello
        0
    """
    parser = argparse.ArgumentParser(prog="gluon-parallel", description="Data-parallel training for MXNet and Gluon.")
    words = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in commands:
        command.configure(words.add_parser(command.name, help=HELP[command.name], description=HELP[command.name]))
    options, unknown = parser.parse_known_args(argv)
    if unknown:  # argparse itself would print the usage of `gluon-parallel`, which does not show the right ones
        words.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return {command.name: command for command in commands}[options.command].main(options) or 0
    except KeyboardInterrupt:
        if options.command == RUN.name:  # it is the script's, and passes through
            raise
        return INTERRUPTED


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

    ConfigError: there is none, or it is no Python code.
    """
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:  # of the package around it
        raise ConfigError(f"module {name!r} cannot be imported: {error}") from error
    if spec is None:
        raise ConfigError(f"there is no module {name!r}, neither in {os.getcwd()} nor installed in {sys.prefix}")
    if getattr(spec.loader, "get_code", lambda name: None)(spec.name) is None:
        raise ConfigError(f"module {name!r} is no Python code; name a module that is a Python file")
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


def _configure_run(parser):
    parser.add_argument("-m", action="store_true", dest="module", help="the script is named as a module, as for python")
    parser.add_argument(
        "--sync-batch-norm", choices=["mxnet", "ours"], default="mxnet",
        help="ours: gluon.contrib.nn.SyncBatchNorm becomes gp.nn.SyncBatchNorm (mxnet)",
    )  # fmt: skip
    parser.add_argument("script", help="a Python file, which may say `import mxnet` on its own")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script finds in sys.argv")


def _run(options):
    if options.sync_batch_norm == "ours":
        from ..nn import replace_contrib  # here: the command line without MXNet needs this file

        replace_contrib()
    try:
        if options.module:
            spec = find_module(options.script)
        else:
            with open(options.script, "rb"):
                pass
    except ConfigError as error:
        print(f"gluon-parallel run: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"gluon-parallel run: {options.script!r} cannot be read: {error.strerror}; name a file", file=sys.stderr)
        return 2
    with profile.profile_if_requested():
        if options.module:
            run_module(spec, options.arguments)
        else:
            run_script(options.script, options.arguments)
    return 0


RUN = Command("run", _configure_run, _run)
