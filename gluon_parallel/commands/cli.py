"""Command line: reads which command is named, and runs that one alone, before or after MXNet is imported."""

import argparse
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Optional

from .. import __version__
from ..errors import ConfigError, GluonParallelError

INTERRUPTED = 130  # the exit status after Ctrl-C, as in shells

# Each word after `gluon-parallel`: the module with its `configure(parser)` and `main(options)`, and its help. It is
# imported when it is named, because most need MXNet, which `doctor`, `launch`, `--help` and errors do without.
COMMANDS = {
    "run": (".run", "Run a script that knows only MXNet, and make MXNet importable for it."),
    "launch": ("..launch", "Run one script as several processes, on one host or on many, and end them together."),
    "profile": (".profile", "Run a script, or launch it, and show where the time of its training steps goes."),
    "parity": (
        ".parity",
        "Train some steps on 1 x 1, D x 1 and D x P (devices x processes); fail if the weights differ.",
    ),
    "doctor": (
        ".doctor",
        "Check this machine and installation, and name what cures it; exit status 0 if nothing has failed.",
    ),
}


class ArgumentError(ConfigError):
    """An argument of a command is wrong, which it has noticed before it has run a script."""


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command that the words of `argv`, by default this process's, name; returns the exit status.

    An error of this package is printed in a line; what a script raises under `run` or `profile` passes through.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="gluon-parallel", description="Data-parallel training for MXNet and Gluon.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    chosen = None
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if words[:1] == [name]:
            chosen = importlib.import_module(module, __package__)
            chosen.configure(command)
    options, unknown = parser.parse_known_args(words)
    if unknown:  # argparse itself would print the usage of `gluon-parallel`, which does not show the right ones
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    if chosen is None:
        parser.error(f"the command {options.command} must be the first word")
    try:
        return chosen.main(options) or 0
    except KeyboardInterrupt:
        if options.command == "run":  # it is the script's, and passes through
            raise
        return INTERRUPTED
    except GluonParallelError as error:
        if options.command in ("run", "profile") and not isinstance(error, ArgumentError):  # the same
            raise
        print(f"gluon-parallel {options.command}: {error}", file=sys.stderr)
        return 2


def run_if_asked():
    """Run a command that does without MXNet and exit, if this process was started for one; otherwise return.

    The first lines of ``gluon_parallel/__init__`` call it, because the imports behind them bring MXNet.
    """
    if not _is_command_line():
        return
    words = sys.argv[1:]
    command = words[0] if words and words[0] in COMMANDS else None
    needs_mxnet = command not in (None, "doctor", "launch")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends an import without its traceback
    try:
        if needs_mxnet:
            from ..mxnet import compat as compat
            from ..native import library

            library()
        elif command is not None:
            importlib.import_module(COMMANDS[command][0], __package__)
    except Exception as error:
        from .doctor.probes import reason

        said = reason("".join(traceback.format_exception_only(type(error), error)))
        print(f"gluon-parallel {words[0]}: {said}. `gluon-parallel doctor` checks this installation", file=sys.stderr)
        sys.exit(2)
    if not needs_mxnet:
        import_done()
        sys.exit(main(words))  # which runs it, shows the help, or says what is wrong with the words


def import_done():
    """From now on Ctrl-C is an exception again, and garbage collections leave out what has been imported.

    Otherwise each full collection takes 50 ms more, and the end of the process 0.1 s more. Who looks for what refers to
    an object, as by ``gc.get_referrers``, calls ``gc.unfreeze()`` before.
    """
    gc.freeze()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command_line():
    """Whether this process is ``gluon-parallel ...`` or ``python -m gluon_parallel ...``."""
    name = (getattr(sys, "argv", None) or [""])[0]
    if name != "-m":
        return os.path.basename(name) == "gluon-parallel"
    try:  # Python is still looking for the module, whose name stands before the arguments
        with open("/proc/self/cmdline", "rb") as file:
            words = file.read().split(b"\0")[:-1]
    except OSError:  # then the command runs as all others do, after the import
        return False
    return words[-len(sys.argv)] in (b"gluon_parallel", b"-mgluon_parallel")
