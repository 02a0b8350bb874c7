"""The command line before MXNet is imported: `doctor`, help and errors, and the sentence for an import that fails."""

import os
import signal
import sys
import traceback

from . import cli


def run_if_asked():
    """Run a command that does without MXNet and exit, if this process was started for one; otherwise return.

    The first lines of ``gluon_parallel/__init__`` call it, because everything behind them needs MXNet.
    """
    if not _is_command_line():
        return
    words = sys.argv[1:]
    if words[:1] == ["doctor"] or words[:1] == [] or words[0] not in cli.COMMANDS:
        sys.exit(cli.main(words))  # which runs the doctor, shows the help, or says what is wrong with the words
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends an import without its traceback
    try:
        from .. import compat as compat
    except Exception as error:
        from .doctor.probes import reason

        said = reason("".join(traceback.format_exception_only(type(error), error)))
        print(f"gluon-parallel {words[0]}: {said}. `gluon-parallel doctor` checks this installation", file=sys.stderr)
        sys.exit(2)


def import_done():
    """From now on Ctrl-C is an exception again, as Python begins with."""
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
