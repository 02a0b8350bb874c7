"""Launch of one script as several processes on one or many hosts: the function `launch`, and the command."""

import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, Union

from .. import bounds
from ..device_names import read as read_devices
from ..environment import JOINS, LAUNCH_FOLDER, MAX_PROCESSES, MIN_PROCESSES
from ..errors import LaunchError
from ..forks import SIGNALS, signals_handled
from ..launch_engines import LaunchEngine, forwarded, python_path
from ..launch_engines import hosts as _hosts
from ..store_table import launch_engines
from .group import Launcher
from .host_list import HostList, ask
from .logs import Logs, make_folder
from .member import Failure

TIMEOUT = 60.0  # seconds
SYNC_BATCH_NORMS = ("mxnet", "ours")


class Result(NamedTuple):
    """How a launch ended."""

    exit_code: int  # 0 if every process ended with status 0
    failure: Optional[Failure]  # of the last attempt
    num_restarts: int
    logs: Path  # the folder with rank-0.log, ...


def launch(
    script: Union[str, os.PathLike],
    arguments: Sequence[str] = (),
    num_workers: Optional[int] = None,
    engine: str = "mpi",
    devices: Optional[str] = None,
    hosts: Optional[str] = None,
    hostfile: Optional[str] = None,
    max_restarts: int = 0,
    timeout: float = TIMEOUT,
    logs: Optional[str] = None,
    num_servers: Optional[int] = None,
    rsh: str = "ssh",
    live: bool = True,
    module: bool = False,
    sync_batch_norm: str = "mxnet",
    announces: bool = True,
    min_processes: Optional[int] = None,
    max_processes: Optional[int] = None,
    host_discovery_script: Optional[str] = None,
) -> Result:
    """Run ``python script arguments...`` as `num_workers` processes, and wait until none of them is left.

    Args:
        script: a Python file, at the same path on every host. It may ``import mxnet`` on its own. With `module`, the
            name of a module, as after ``python -m``.
        arguments: what it finds in ``sys.argv[1:]``.
        num_workers: how many processes; by default as many as `hosts` take.
        engine: ``mpi`` (mpirun), ``ps`` (MXNet's scheduler and servers) or ``horovod`` (horovodrun).
        devices: what ``gp.devices("auto")`` means in every process, such as ``cpu:2``.
        hosts, hostfile: ``h1:2,h2:2``, or a file of such lines; this machine alone when both are left out.
        max_restarts: how many times the group is started again after a failure. The processes find the number of the
            attempt in ``GLUON_PARALLEL_RESTART``; a script begun by ``gp.start`` then resumes from its last
            checkpoint by itself.
        timeout: seconds within which a process that never starts, is stopped or falls silent has ended the group.
        logs: folder of the log files; by default a new ``runs/launch/<number>``.
        num_servers: of ``ps``; by default one per host.
        rsh: the command that runs another one on a host.
        live: whether every line of every process is shown, behind its rank.
        module: whether `script` is the name of a module.
        sync_batch_norm: ``ours`` gives the script :class:`gluon_parallel.nn.SyncBatchNorm` for MXNet's contrib layer.
        min_processes: go on without processes that are killed, stopped or hang, as long as so many are left. For
            ``mpi`` and a script that trains with what ``gp.prepare`` or ``gp.survive`` returns. By default a lost
            process ends all.
        max_processes: have a new process take the place of each that is lost, while the others train; and with more
            than `num_workers`, have others come and leave as a list says, which is watched: `hostfile`, or what
            `host_discovery_script` prints. Hosts may be lost then, but for the launcher's own. It needs
            `min_processes` and a script that can begin in the middle: one that trains with ``gp.prepare``, or with
            ``gp.survive`` and its ``epochs``.
        host_discovery_script: a program that prints lines as a hostfile has them, asked every 2 seconds.
        announces: whether lines of the launcher's own are shown: where the logs are, and what ended the group.

    Raises:
        LaunchError: nothing could be started: the script cannot be read, the engine is not installed, the hosts or
            the numbers make no sense.
        DeviceUnavailable: `devices` cannot be read.
        OutputUnavailable: the logs cannot be written.
    """
    known = launch_engines()
    kind = known.get(engine, LaunchEngine)
    for is_wrong, complaint in (
        (sync_batch_norm not in SYNC_BATCH_NORMS,
         f"--sync-batch-norm is {sync_batch_norm!r}, wanted one of {', '.join(SYNC_BATCH_NORMS)}"),
        (engine not in known, f"--engine is {engine!r}, wanted one of {', '.join(known)}"),
        (not 0 < timeout <= 1e9, f"--timeout is {timeout}, wanted a number of seconds above 0 and up to 1e9"),
        (min_processes is not None and not kind.goes_on,
         f"--min-processes {min_processes}: with the engine {engine!r} no process goes on alone"),
        (max_processes is not None and not kind.goes_on,
         f"--max-processes {max_processes}: with the engine {engine!r} no process joins others; leave out --engine"),
        (max_processes is not None and min_processes is None,
         f"--max-processes {max_processes}: who joins takes the place of a lost process; add --min-processes 1"),
        (num_servers is not None and not kind.has_servers,
         f"--servers {num_servers}: the engine {engine!r} has no servers; add --engine ps"),
        (hosts is not None and hostfile is not None, "--hosts and --hostfile say the same thing; give one of them"),
    ):  # fmt: skip
        if is_wrong:
            raise LaunchError(complaint)
    for name, number, least in (
        ("--max-restarts", max_restarts, 0), ("--min-processes", min_processes, 1), ("--servers", num_servers, 1),
        ("--max-processes", max_processes, 1),
    ):  # fmt: skip
        if number is not None:
            bounds.whole(name, number, least, bounds.PROCESSES, LaunchError)
    if module:
        named_script = ["-m", _check_module(str(script))]
    else:
        path = Path(script).resolve()
        if not os.access(path, os.R_OK) or path.is_dir():
            raise LaunchError(f"{str(path)!r} is no script that can be read; name a Python file")
        named_script = [str(path)]
    command = ["--sync-batch-norm", sync_batch_norm, *named_script, *map(str, arguments)]
    _count_devices(devices)  # which the processes are told only after they have been started
    if host_discovery_script is not None and (hostfile is not None or hosts is not None or max_processes is None):
        raise LaunchError(
            "--host-discovery-script: it takes the place of --hosts and --hostfile, and says how many processes there "
            "shall be up to --max-processes; give that, and neither of those"
        )
    named = _named_hosts(hosts, hostfile, host_discovery_script)
    num_workers = _hosts.check_num_workers(num_workers, named)
    if min_processes is not None and min_processes > num_workers:
        raise LaunchError(f"--min-processes is {min_processes}, more than the {num_workers} processes that are started")
    watched = hostfile is not None or host_discovery_script is not None
    if max_processes is not None and (max_processes < num_workers or (max_processes > num_workers and not watched)):
        raise LaunchError(
            f"--max-processes is {max_processes}, and {num_workers} are started: wanted as many, so that others take "
            "the places of lost ones, or more, with a list that says when: --hostfile or --host-discovery-script"
        )
    named = kind.arrange(named)
    servers = num_servers if num_servers is not None else max(1, len(named))
    address = _hosts.own_address(named, others_may_come=watched and max_processes is not None)
    make = functools.partial(
        kind, num_servers=servers, rsh=rsh, address=address, min_processes=min_processes, max_processes=max_processes
    )
    remark = make(num_workers, hosts=named).check()
    can_lose = kind.goes_on and num_workers > 1 and min_processes is None
    again = ["to start again: --max-restarts N"] * (max_restarts == 0)
    advice = "; ".join([*["to go on without a lost process: --min-processes M"] * can_lose, *again])
    written, wants = Logs(make_folder(logs), live, announces), None
    if max_processes is not None and watched:
        wants = HostList(hostfile, host_discovery_script, written.say, takes_others=address != _hosts.LOOPBACK)
    try:
        if remark is not None:
            written.say(remark)
        many, whose = ("1 process", "its") if num_workers == 1 else (f"{num_workers} processes", "their")
        written.say(f"{many} by {engine}; {whose} logs are in {written.folder}")
        interrupts: list[int] = []  # the numbers of the signals that asked for an end
        with signals_handled(dict.fromkeys(SIGNALS, lambda number, _: interrupts.append(number))):
            for attempt in range(max_restarts + 1):
                used = make(num_workers, hosts=named)
                programs = _programs(used, command, devices, timeout, written.folder if announces else None, attempt)
                group = Launcher(used, programs, written, timeout, interrupts, min_processes, advice, wants)
                failure = group.run()
                if failure is not None and failure.member and group.decisions.raised:
                    written.say(group.decisions.raised[0])  # last: what others say of it has come before
                if failure is None or interrupts or attempt == max_restarts:
                    break
                if wants is not None:
                    wants.look_at_once()
                    listed = wants.hosts or named
                    num = min(sum(host.slots for host in listed), max_processes or num_workers)
                    if num >= (min_processes or 1):
                        num_workers, named = num, listed
                    else:
                        need = f"--min-processes is {min_processes}"
                        written.say(f"the list has {num} processes, and {need}: the hosts of the restart are as before")
                    if interrupts:  # while the list was read
                        break
                written.say(f"restart {attempt + 1} of {max_restarts}", [f"rank {rank}" for rank in range(num_workers)])
            if failure is None and (lost := group.decisions.lost()):
                joined = group.decisions.joins.joined if group.decisions.joins is not None else []
                others = f"; joined: {', '.join(joined)}" if joined else ""
                written.say(f"done; lost on the way, of {num_workers} processes: {', '.join(lost)}{others}")
        return Result(failure.exit_code if failure else 0, failure, attempt, written.folder)
    finally:
        if wants is not None:
            wants.close()
        written.close()


def _named_hosts(named: Optional[str], file: Optional[str], script: Optional[str]) -> list[_hosts.Host]:
    """The hosts that are named by the one that is not None; none: all is on this machine."""
    if script is not None:
        return ask(script)
    return _hosts.parse(named) if named is not None else _hosts.read_file(file) if file is not None else []


def _check_module(name: str) -> str:
    """Only the outermost package is looked for, since the others are found by importing it, which is the processes'."""
    package, here = name.partition(".")[0], os.getcwd()
    try:
        found = PathFinder.find_spec(package, [here]) or importlib.util.find_spec(package)
    except ValueError:
        found = None
    if found is None:
        raise LaunchError(f"there is no module {name!r}, neither in {here} nor installed in {sys.prefix}")
    return name


def _programs(
    engine: LaunchEngine,
    script: Sequence[str],
    devices: Optional[str],
    timeout: float,
    folder: Optional[Path],
    attempt: int,
) -> Callable[[str, int, str], dict[str, Any]]:
    """A function of a member, its host's cores and its address: what its agent runs, in which environment."""
    places = _hosts.place(engine.num_workers, engine.hosts)
    common = {
        **forwarded(),
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",  # so that the live view is live, and nothing is lost with a process that is killed
        "GLUON_PARALLEL_NUM_WORKERS": str(engine.num_workers),
        "GLUON_PARALLEL_KVSTORE": engine.kvstore,
        "GLUON_PARALLEL_TIMEOUT": f"{timeout:g}",
        "GLUON_PARALLEL_RESTART": str(attempt),
    }
    for name in (MIN_PROCESSES, MAX_PROCESSES, JOINS, LAUNCH_FOLDER):
        common.pop(name, None)  # of a launch that has started this one
    if folder is not None:  # else it is removed at the end, and nothing is to be written there
        common[LAUNCH_FOLDER] = str(folder)
    if engine.min_processes is not None:
        common[MIN_PROCESSES] = str(engine.min_processes)
    if engine.max_processes is not None:
        common[MAX_PROCESSES] = str(engine.max_processes)

    def program_of(member: str, cores: int, address: str) -> dict[str, Any]:
        role, _, number = member.partition(" ")
        env = {**common, **engine.environment(member, address)}
        argv = ["-c", "import gluon_parallel"]  # the whole life of a server: it ends when all workers are done
        if role == "rank":
            argv = ["-m", "gluon_parallel", "run", *script]
            if int(number) in engine.new_places:
                _, local_rank, num_local = engine.new_places[int(number)]
                env[JOINS] = "1"
            else:
                host, local_rank = places[int(number)]
                num_local = sum(name == host for name, _ in places)
            env.update(GLUON_PARALLEL_RANK=number, GLUON_PARALLEL_LOCAL_RANK=str(local_rank))
            env.update(_devices(devices, local_rank, num_local, cores))
        return {"argv": [sys.executable, *argv], "env": env, "cwd": os.getcwd()}

    return program_of


def _devices(spec: Optional[str], local_rank: int, num_local: int, cores: int) -> dict[str, str]:
    """The variables that give a process its devices and its share of the cores, unless the user has set them.

    Example:
        >>> _devices("gpu:2", local_rank=1, num_local=2, cores=8)["CUDA_VISIBLE_DEVICES"]
        '2,3'
    """
    env = {}
    kind, num, counted = _count_devices(spec)
    if "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = str(max(1, cores // num_local // (num if kind == "cpu" else 1)))
    if spec is not None:
        env["GLUON_PARALLEL_DEVICES"] = spec
        if kind == "gpu" and counted and "CUDA_VISIBLE_DEVICES" not in os.environ:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(local_rank * num + i) for i in range(num))
    return env


def _count_devices(spec: Optional[str]) -> tuple[str, int, bool]:
    """The kind of devices, how many, and whether they are any so many rather than certain ones.

    Example:
        >>> _count_devices("gpu:2"), _count_devices("cpu@0,1"), _count_devices(None)
        (('gpu', 2, True), ('cpu', 2, False), ('cpu', 1, False))
    """
    if spec is None or spec.strip().lower() == "auto":
        return "cpu" if spec is None else "auto", 1, False
    kind, count, numbers = read_devices(spec)
    return kind, count or len(numbers or [0]), count is not None


def configure(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("-n", type=bounds.flag, dest="num_workers", metavar="N", help="how many processes")
    parser.add_argument("--devices", help="of each process: what devices 'auto' means in it, such as cpu:2 or gpu:1")
    parser.add_argument(
        "--engine", default="mpi", choices=list(launch_engines()), help="how they find each other (mpi)"
    )
    parser.add_argument("--hosts", metavar="h1:2,h2:2", help="where they run; this machine if left out")
    parser.add_argument("--hostfile", metavar="FILE", help="the same as lines of a file: h1 slots=2")
    parser.add_argument("--rsh", default="ssh", help="the command that runs another one on a host (ssh)")
    parser.add_argument(
        "--servers", type=bounds.flag, dest="num_servers", help="parameter servers of ps (one per host)"
    )
    parser.add_argument(
        "--max-restarts", type=bounds.flag, default=0, metavar="N", help="start again after N failures (0)"
    )
    parser.add_argument(
        "--min-processes",
        type=bounds.flag,
        metavar="N",
        help="go on without lost processes while N are left (all must live)",
    )
    parser.add_argument(
        "--max-processes",
        type=bounds.flag,
        metavar="N",
        help="with --min-processes: have new processes join in the place of lost ones, and, up to N, as the list says "
        "that is watched: --hostfile or --host-discovery-script (none joins)",
    )
    parser.add_argument(
        "--host-discovery-script", metavar="PROGRAM", help="prints lines as a hostfile has them; with --max-processes"
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
