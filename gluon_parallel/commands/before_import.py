"""Commands that run before MXNet is imported, which may fail: `doctor`, and the command line's own help and errors."""

import os
import sys


def run_if_asked():
    """Run such a command and exit, if this process was started for one; otherwise return.

    The first lines of ``gluon_parallel/__init__`` call it, because everything behind them needs MXNet.
    """
    if not _is_command_line():
        return
    from . import cli, doctor

    words = sys.argv[1:]
    if words[:1] == ["doctor"]:
        sys.exit(cli.main([cli.Command("doctor", doctor.configure, doctor.main)], words))
    if words[:1] == [] or words[0] not in cli.HELP:  # shows the help, or says what is wrong with the words
        sys.exit(cli.main([cli.Command(name, lambda parser: None, lambda options: 2) for name in cli.HELP], words))


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
