"""The command `profile`: run or launch a script, and find out where the time of its training steps goes."""

import argparse
import contextlib
import os
import tempfile

from .. import bounds
from . import cli
from .profiling import profile

_VARIABLE = "GLUON_PARALLEL_PROFILE"  # tells the processes "steps,skip,folder"


def configure(parser):
    """Add the command's arguments to its parser."""
    parser.add_argument("--folder", default="profile", help="folder for the page and the trace (profile)")
    parser.add_argument("--steps", type=bounds.flag, default=20, metavar="N", help="number of steps to record (20)")
    parser.add_argument(
        "--skip", type=bounds.flag, default=5, metavar="N", help="number of steps to skip before them (5)"
    )
    parser.add_argument("script", help="a Python file; or `launch` or `run`, and what follows: launch -n 2 script.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script").required = False


def main(options):
    """Run or launch the script with profiling; returns its exit status."""
    folder = os.path.abspath(options.folder)
    try:
        profile(folder, options.steps, options.skip)  # to check the numbers; the processes make their own
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # can files be written there?
    except ValueError as error:
        raise cli.ArgumentError(str(error).removeprefix("profile: ")) from error
    except OSError as error:
        raise cli.ArgumentError(f"--folder {folder} cannot be written to: {error.strerror}") from error
    os.environ[_VARIABLE] = f"{options.steps},{options.skip},{folder}"
    try:
        command = [] if options.script in ("launch", "run") else ["run"]
        return cli.main([*command, options.script, *options.arguments])
    finally:
        os.environ.pop(_VARIABLE, None)


@contextlib.contextmanager
def profile_if_requested():
    """Profile what runs in this block, if the command `profile` started this process."""
    value = os.environ.pop(_VARIABLE, None)  # so that processes which the script starts are not profiled
    if value is None:
        yield
        return
    steps, skip, folder = value.split(",", 2)
    with profile(folder, int(steps), int(skip)):
        yield
