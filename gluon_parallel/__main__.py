"""Entry point of `python -m gluon_parallel` and `gluon-parallel`."""

import sys

from . import launch
from .commands import cli


def main():
    """Run the command that this process's command line names; returns its exit status."""
    cli.import_done()
    return launch.worker.run(cli.main)


if __name__ == "__main__":
    sys.exit(main())
