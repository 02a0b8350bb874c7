"""Groups of processes take turns at the same tasks, round by round, so that a busy machine meets all of them alike.

It imports nothing but the standard library: one of the groups may run under another Python.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = "BENCHMARK_FOLDER"  # where a group's processes find the pipes


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
        """(seconds of the slowest, processor seconds of all) per repetition."""
        for file in self._ask:
            os.write(file, f"{task} {repeats}\n".encode())
        answers = [self._read(file) for file in self._answer]
        return max(seconds for seconds, _ in answers) / repeats, sum(used for _, used in answers) / repeats

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


def medians(groups, task, repeats, rounds, warm_up):
    """name -> (seconds, processor seconds) per repetition of `task`: medians over rounds in which all take turns.

    Args:
        groups: name -> Group, or (Group, task) where one group has several tasks of its own.
        repeats, rounds: repetitions in one turn, turns.
        warm_up: repetitions before the first turn, which do not count.
    """
    pairs = {name: group if isinstance(group, tuple) else (group, task) for name, group in groups.items()}
    taken: dict[str, list] = {name: [] for name in pairs}
    for group, what in pairs.values():
        group.run(what, warm_up)
    for _ in range(rounds):
        for name, (group, what) in pairs.items():
            taken[name].append(group.run(what, repeats))
    return {name: tuple(statistics.median(column) for column in zip(*rows)) for name, rows in taken.items()}


def load():
    """How busy the machine is, in words."""
    return f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores, Python {sys.version.split()[0]}"
