"""Command line: reads which command is named, and imports and runs that one alone."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Optional

INTERRUPTED = 130  # the exit status after Ctrl-C, as in shells

# Each word after `gluon-parallel`: the module with its `configure(parser)` and `main(options)`, and its help. It is
# imported when it is named, because most need MXNet, which `doctor`, `--help` and errors must do without.
COMMANDS = {
    "run": (".run", "Run a script that knows only MXNet, and make MXNet importable for it."),
    "launch": ("..launch", "Run one script as several processes, on one host or on many, and end them together."),
    "profile": (".profile", "Run a script, or launch it, and show where the time of its training steps goes."),
    "parity": (
        ".parity",
        "Train some steps on 1 x 1, D x 1 and D x P (devices x processes); fail if the weights differ.",
    ),
    "estimate": (".estimate", "Estimate memory, exchanged bytes and efficiency of a training without running it."),
    "doctor": (
        ".doctor",
        "Check this machine and installation, and name what cures it; exit status 0 if nothing has failed.",
    ),
}


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command that the words of `argv`, by default this process's, name; returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="gluon-parallel", description="Data-parallel training for MXNet and Gluon.")
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
