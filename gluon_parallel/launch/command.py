"""The command `launch`: its arguments, which the command `run` shares as far as they name a script."""

from typing import Any

from ..launch_engines import ENGINES
from .launching import SYNC_BATCH_NORMS, TIMEOUT, launch


def configure(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("-n", type=int, dest="num_workers", metavar="N", help="how many processes")
    parser.add_argument("--devices", help="of each process: what devices 'auto' means in it, such as cpu:2 or gpu:1")
    parser.add_argument("--engine", default="mpi", choices=list(ENGINES), help="how they find each other (mpi)")
    parser.add_argument("--hosts", metavar="h1:2,h2:2", help="where they run; this machine if left out")
    parser.add_argument("--hostfile", metavar="FILE", help="the same as lines of a file: h1 slots=2")
    parser.add_argument("--rsh", default="ssh", help="the command that runs another one on a host (ssh)")
    parser.add_argument("--servers", type=int, dest="num_servers", help="parameter servers of ps (one per host)")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N", help="start again after N failures (0)")
    parser.add_argument(
        "--min-processes", type=int, metavar="N", help="go on without lost processes while N are left (all must live)"
    )
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT, metavar="SECONDS",
        help=f"limit of each wait for a process to start, to answer and to exchange ({TIMEOUT:g})",
    )  # fmt: skip
    parser.add_argument("--logs", metavar="FOLDER", help="folder for rank-0.log, ... (runs/launch/<number>)")
    parser.add_argument("--quiet", action="store_true", help="only the logs get what the processes say")
    add_script_arguments(parser)


def add_script_arguments(parser: Any) -> None:
    """Add to a command's parser what names a script, which takes the rest of the command line."""
    parser.add_argument(
        "--sync-batch-norm", choices=SYNC_BATCH_NORMS, default="mxnet",
        help="ours: a script's gluon.contrib.nn.SyncBatchNorm becomes gp.nn.SyncBatchNorm (mxnet)",
    )  # fmt: skip
    parser.add_argument("-m", action="store_true", dest="module", help="the script is named as a module, as for python")
    parser.add_argument("script", help="a Python file, which may say `import mxnet` on its own")
    parser.add_argument("arguments", nargs="...", help="what the script finds in sys.argv").required = False


def main(options: Any) -> int:
    """Launch what the command line asks for; returns the exit status of what failed, or 0."""
    arguments = {name: value for name, value in vars(options).items() if name not in ("command", "quiet")}
    return launch(**arguments, live=not options.quiet).exit_code
