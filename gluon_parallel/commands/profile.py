"""The command `profile`: run or launch a script, and find out where the time of its training steps goes."""

import argparse
import contextlib
import os
import sys
import tempfile

_VARIABLE = "GLUON_PARALLEL_PROFILE"  # what the processes are told: steps, skip and folder


def configure(parser):
    """Add the command's arguments to its parser."""
    parser.add_argument("--folder", default="profile", help="for the page and the trace (profile)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="how many steps are recorded (20)")
    parser.add_argument("--skip", type=int, default=5, metavar="N", help="how many come before them (5)")
    parser.add_argument("script", help="a Python file; or `launch`, and what follows it: launch -n 2 script.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script finds in sys.argv")


def main(options, run):
    """Run what the command line asks for; returns its exit status.

    Args:
        options: the arguments.
        run: runs the command of a list of words, as the command line does, and returns its exit status.
    """
    from .profiling import profile  # here: it needs MXNet, and the command line without it names `doctor`

    folder = os.path.abspath(options.folder)
    try:
        profile(folder, options.steps, options.skip)  # refuses what makes no sense
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except ValueError as error:
        print(f"gluon-parallel {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"gluon-parallel profile: --folder {folder} cannot be written to: {error.strerror}", file=sys.stderr)
        return 2
    os.environ[_VARIABLE] = f"{options.steps},{options.skip},{folder}"
    try:
        before = [] if options.script == "launch" else ["run"]
        return run([*before, options.script, *options.arguments])
    finally:
        os.environ.pop(_VARIABLE, None)


@contextlib.contextmanager
def asked_for():
    """Profile what runs in this block, if the command asked this process for it."""
    value = os.environ.pop(_VARIABLE, None)  # not of the processes that the script starts
    if value is None:
        yield
        return
    from .profiling import profile

    steps, skip, folder = value.split(",", 2)
    with profile(folder, int(steps), int(skip)):
        yield
