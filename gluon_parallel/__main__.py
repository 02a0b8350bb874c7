"""Entry point of `python -m gluon_parallel` and `gluon-parallel`, with the list of the commands."""

import sys

from . import launch
from .commands import before_import, cli, doctor, estimate, parity, profile

COMMANDS = [
    cli.RUN,
    cli.Command("launch", launch.configure, launch.main),
    cli.Command("profile", profile.configure, lambda options: profile.main(options, run)),
    cli.Command("parity", parity.configure, parity.main),
    cli.Command("estimate", estimate.configure, estimate.main),
    cli.Command("doctor", doctor.configure, doctor.main),  # which runs before the import, as a rule
]


def run(words=None):
    """Run the command that these words name, by default those of this process's command line."""
    return cli.main(COMMANDS, words)


def main():
    """Run the command that this process's command line names; returns its exit status."""
    before_import.import_done()
    return launch.worker.run(run)


if __name__ == "__main__":
    sys.exit(main())
