"""Command `doctor`: a report on this installation and machine, which also works where MXNet cannot be imported."""

TIMEOUT = 55.0  # seconds for all sections; the limits of each are meant for so many
MORE_TIME = f"gluon-parallel doctor --timeout {4 * TIMEOUT:.0f}"


def configure(parser):
    """Add the command's arguments to its parser."""
    parser.add_argument("--json", action="store_true", help="print one JSON object in the place of text")
    parser.add_argument("--hosts", metavar="h1:1,h2:1", help="try the engines between these hosts as well")
    parser.add_argument("--rsh", default="ssh", help="the command that runs another one on a host (ssh)")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT, metavar="SECONDS",
        help=f"for the whole report ({TIMEOUT:g}); sections that need more time are inconclusive",
    )  # fmt: skip


def main(options):
    """Print the report; returns 0 if training works, and exchanges between the hosts if some are named, or else 1."""
    from . import command  # here: the other commands do without it

    return command.main(options)
