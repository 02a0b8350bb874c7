"""Groups of processes take turns at the same tasks, round by round, so that a busy machine meets all of them alike.

It imports nothing but the standard library: one of the groups may run under another Python.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

FOLDER = "GLUON_PARALLEL_BENCHMARK_FOLDER"  # where a group's processes find the pipes; the launcher passes it on
AS_ROOT = {f"{tool}_ALLOW_RUN_AS_ROOT{more}": "1" for tool in ("OMPI", "PRTE") for more in ("", "_CONFIRM")}


class Turn(NamedTuple):
    """What one repetition of a task took."""

    seconds: float  # of the slowest process
    processor: float  # seconds, of all processes
    processes: int


def serve(rank, tasks):
    """In a process of a group: run what is asked for, and answer with its seconds and its seconds of processor time.

    Args:
        rank: this process's number in its group.
        tasks: name -> function(repeats), which returns when everything is done.
    """
    folder = Path(os.environ[FOLDER])
    with open(folder / f"{rank}.ask") as ask, open(folder / f"{rank}.answer", "w") as answer:
        for line in ask:
            name, repeats = line.rsplit(maxsplit=1)
            began, used = time.perf_counter(), time.process_time()
            tasks[name](int(repeats))
            print(time.perf_counter() - began, time.process_time() - used, file=answer, flush=True)


class Group:
    """Processes that were started by some commands, waiting to be asked.

    Args:
        name: for messages.
        commands: (argv, environment) of each process to start; the first ones are the workers, or start them.
        num: how many processes call :func:`serve`.
    """

    def __init__(self, name, commands, num, limit=300.0):
        self.name, self._limit = name, limit
        self._folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
        for rank in range(num):
            os.mkfifo(self._folder / f"{rank}.ask")
            os.mkfifo(self._folder / f"{rank}.answer")
        # Open at both ends, so that nobody waits for the other one to open.
        self._ask = [os.open(self._folder / f"{rank}.ask", os.O_RDWR) for rank in range(num)]
        self._answer = [open(self._folder / f"{rank}.answer", "r+b", buffering=0) for rank in range(num)]
        self._processes = [
            # Not in sessions of their own: Linux would give each session an equal share of a busy machine.
            subprocess.Popen(argv, env={**os.environ, **env, FOLDER: str(self._folder)}, stdin=subprocess.DEVNULL,
                             preexec_fn=os.setpgrp)
            for argv, env in commands
        ]  # fmt: skip

    def run(self, task, repeats):
        """The :class:`Turn` of one repetition, a mean of so many."""
        for file in self._ask:
            os.write(file, f"{task} {repeats}\n".encode())
        answers = [self._read(file) for file in self._answer]
        seconds, used = zip(*answers)
        return Turn(max(seconds) / repeats, sum(used) / repeats, len(answers))

    def _read(self, file):
        deadline, text = time.monotonic() + self._limit, b""
        while not text.endswith(b"\n"):
            if not select.select([file], [], [], 1.0)[0]:
                if self._processes[0].poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{self.name}: no answer; look above for what its processes say")
                continue
            text += file.read(1 << 12)
        seconds, used = text.split()
        return float(seconds), float(used)

    def peak_memory(self):
        """GB that the processes have taken at most, in sum, with the processes that they started."""
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # a process that has just ended
                parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        found = {process.pid for process in self._processes}
        while more := {child for child, parent in parents.items() if parent in found} - found:
            found |= more
        texts = [Path(f"/proc/{pid}/status").read_text() for pid in found]
        return sum(int(text.partition("VmHWM:")[2].split()[0]) for text in texts if "VmHWM:" in text) / 1e6

    def close(self):
        """End the processes."""
        for number in self._ask:
            os.close(number)
        for file in self._answer:
            file.close()
        for process in self._processes:  # workers end when there is nobody left who asks; servers after them
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, number)
            process.wait()
        shutil.rmtree(self._folder)


@contextlib.contextmanager
def started(pairs=()):
    """A dict of `pairs`, name -> :class:`Group`; all groups in it end with the context, at an error or SIGTERM too.

    An iterator of pairs may start one group after the other: where a later one cannot start, the earlier ones end.
    """
    groups: dict[str, Group] = {}
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for name, group in pairs:
            groups[name] = group
        yield groups
    finally:
        for group in groups.values():
            group.close()
        signal.signal(signal.SIGTERM, before)


def take_turns(groups, task, repeats, rounds, warm_up):
    """name -> its :class:`Turn` in each of the rounds.

    Args:
        groups: name -> Group, or (Group, task) where one group has several tasks of its own.
        repeats, rounds: repetitions in one turn, turns.
        warm_up: repetitions before the first turn, which do not count.
    """
    pairs = {name: group if isinstance(group, tuple) else (group, task) for name, group in groups.items()}
    taken: dict[str, list[Turn]] = {name: [] for name in pairs}
    for group, what in pairs.values():
        group.run(what, warm_up)
    for _ in range(rounds):
        for name, (group, what) in pairs.items():
            taken[name].append(group.run(what, repeats))
    return taken


def periods(quick=False):
    """Name -> the steps that are measured, counted from 0; with `quick`, the early ones alone."""
    return {"steps 3 to 12": slice(2, 12), **({} if quick else {"steps 100 to 150": slice(99, 150)})}


def early_and_late(groups, task, quick=False, repeats=1):
    """Pairs of "steps 3 to 12" and "steps 100 to 150" with what :func:`take_turns` returns; nothing runs before step 1.

    A turn is one step, or so many repetitions where these take little time. With `quick`, the first pair alone.
    """
    done = 0
    for when, steps in periods(quick).items():
        yield when, take_turns(groups, task, repeats, (steps.stop - steps.start) // repeats, steps.start - done)
        done = steps.stop


def mpirun(num):
    """The words that start `num` processes of the command behind them; root needs the variables :data:`AS_ROOT` too."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return [shutil.which("mpirun", path=path) or "mpirun", *"--oversubscribe --bind-to none -n".split(), str(num)]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def data_parallel_torch(python, net, address="127.0.0.1", interface="lo"):
    """The command of each of two processes that train a net with PyTorch's DistributedDataParallel, one thread each."""
    script = str(Path(__file__).resolve().with_name("kvstore_torch.py"))
    meet = {"MASTER_ADDR": address, "MASTER_PORT": free_port(), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": interface}
    return [([python, script, net], {**meet, "OMP_NUM_THREADS": "1", "RANK": str(rank)}) for rank in range(2)]


def load():
    """How busy the machine is, in words."""
    return f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores, Python {sys.version.split()[0]}"
