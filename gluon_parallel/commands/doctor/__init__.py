"""Command `doctor`: a report on this installation and machine, which also works where MXNet cannot be imported."""

import os
import sys

HELP = "Check this machine and installation, and name the cure of what is wrong; exit status 0 if training works."

TIMEOUT = 55.0  # seconds for all sections; the limits of each are meant for so many
MORE_TIME = f"gluon-parallel doctor --timeout {4 * TIMEOUT:.0f}"


def configure(parser):
    """Add the command's arguments to its parser."""
    parser.add_argument("--json", action="store_true", help="print one JSON object in the place of text")
    parser.add_argument("--hosts", metavar="h1:1,h2:1", help="try the engines between these hosts as well")
    parser.add_argument("--rsh", default="ssh", help="the command that runs another one on a host (ssh)")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT, metavar="SECONDS", help=f"for all of it ({TIMEOUT:g})"
    )


def main(options):
    """Print the report; returns 0 if training works, and exchanges between the hosts if some are named, or else 1."""
    from . import command  # here: the other commands do without it

    return command.main(options)


def run_if_asked():
    """Run the command and exit, if this process was started for it; otherwise return.

    The first lines of ``gluon_parallel/__init__`` call it, because everything behind them needs MXNet.
    """
    if not _asked():
        return
    from .. import cli

    sys.exit(cli.main([cli.Command("doctor", HELP, configure, main)], sys.argv[1:]))


def _asked():
    """Whether this process is ``gluon-parallel doctor`` or ``python -m gluon_parallel doctor``."""
    if getattr(sys, "argv", [])[1:2] != ["doctor"]:
        return False
    if sys.argv[0] != "-m":
        return os.path.basename(sys.argv[0]) == "gluon-parallel"
    try:  # Python is still looking for the module, whose name stands before the arguments
        with open("/proc/self/cmdline", "rb") as file:
            words = file.read().split(b"\0")[:-1]
    except OSError:  # then the command runs as all others do, after the import
        return False
    return words[-len(sys.argv)] in (b"gluon_parallel", b"-mgluon_parallel")
