"""End trainings in random ways, and look at how they end, what they say and have saved, and what they leave behind.

    python scripts/studies/stops.py --minutes 60
    python scripts/studies/stops.py --minutes 10 --busy 2 --only "KILL to a process" --seed 7

A try starts a training, alone or by ``gluon-parallel launch``, with or without worker processes of its loader, with or
without ``--min-processes``. After some steps it gets a signal (a process, the launcher, all of them), its disk is full,
or strangers connect to its ports. Where it has to go on, it has to make more steps, and is asked to stop then. It must
end within a limit, with the right status, name the lost process, and have a checkpoint of the step at which it stopped.
No process, shared memory, temporary file or unfinished file may be left; what is left by a launcher, or by a training
alone, that was killed must go by the end of the next one. A line per try that is wrong says why; the table at the end
counts all. It needs Linux.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

import gluon_parallel as gp
from mxnet import gluon

LIMIT = 12  # seconds, as of gluon-parallel launch
PATIENCE = 90.0  # seconds within which a try has started, has gone on, or has ended, on a busy machine
STOPS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
OURS = r"(OutputUnavailable|CheckpointError|WorkerLost): |error: "  # begins what a user can act upon
SILENCE, LINE, WEB = b"", b"[" * 200_000, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def train(folder: str, workers: int, allowed: int) -> None:
    """Train until asked to stop; the disk of process 0 is full after so many bytes per file, if `allowed` is not 0."""
    net = gluon.nn.Dense(3, in_units=4)
    net.initialize(ctx=gp.devices("auto"))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    data = gluon.data.ArrayDataset(np.random.rand(80, 4).astype("float32"), np.arange(80).astype("float32") % 3)  # noqa: NPY002
    loader = gluon.data.DataLoader(data, 4, num_workers=workers, timeout=LIMIT)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    training, loader = gp.prepare(net, loss, trainer, loader, run=gp.Run(folder))
    for _ in training.epochs(10_000):
        for x, y in loader:
            training.step(x, y)
            time.sleep(0.05)
            training.print("step", training.num_steps, f"of {os.getpid()}")
            if allowed and training.num_steps == 5 and training.store.rank == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, allowed))
        training.end_epoch()


class Situation(NamedTuple):
    """How the training of a try runs."""

    launched: bool
    workers: int  # of its loader
    least: int  # --min-processes, or 0

    def __str__(self) -> str:
        words = [
            "launched" if self.launched else "alone",
            "with workers" if self.workers else "",
            "goes on" * bool(self.least),
        ]
        return ", ".join(filter(None, words))


# processes of this machine ----------------------------------------------------------------------------------------


def parents() -> dict[int, int]:
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(name)] = int(parent)
    return found


def below(process: int) -> list[int]:
    """The numbers of the processes that `process` has started, and that these have."""
    known, found, more = parents(), [], [process]
    while more:
        more = [number for number, parent in known.items() if parent in more]
        found += more
    return found


def words_of(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text("utf-8", "replace").replace("\0", " ")
    return ""


def rank_of(process: int) -> str:
    """The rank that a process of a training has, "" for others."""
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{process}/environ").read_text("utf-8", "replace").split("\0")
        return next((text.partition("=")[2] for text in variables if text.startswith("GLUON_PARALLEL_RANK=")), "")
    return ""


def shared_memory(processes: list[int]) -> set[str]:
    """The files of /dev/shm that these processes use."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            found |= {*re.findall(r"/dev/shm/\S+$", Path(f"/proc/{process}/maps").read_text(), re.MULTILINE)}
    return found


def ports(processes: list[int]) -> Iterator[tuple[str, int]]:
    """The addresses at which these processes listen."""
    inodes = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(f"/proc/{process}/fd/{name}"))
    for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            address, port = fields[1].split(":")
            number = int(port, 16)
            yield socket.inet_ntoa(int(address, 16).to_bytes(4, "little")).replace("0.0.0.0", "127.0.0.1"), number


# one try ----------------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """What is wrong with how a try went."""


class Try:
    """One training in a folder of its own, and what happens to it."""

    def __init__(self, folder: Path, situation: Situation, chosen: random.Random, allowed: int = 0) -> None:
        self.folder, self.situation, self.chosen = folder, situation, chosen
        self.run, self.temporary = folder / "run", folder / "tmp"
        self.temporary.mkdir()
        self.used: set[str] = set()  # shared memory
        self.words = [str(self.run), str(situation.workers), str(allowed)]
        self.log = open(folder / "log", "w+", encoding="utf-8", errors="replace")
        self.process = self.start(3)

    def start(self, processes: int) -> subprocess.Popen:
        launch = ["-m", "gluon_parallel", "launch", "-n", str(processes), "--devices", "cpu:1", "--timeout", str(LIMIT)]
        launch += ["--min-processes", str(self.situation.least)] if self.situation.least else []
        launch += ["--logs", str(self.folder / "logs")]
        argv = [sys.executable, "-u", *(launch if self.situation.launched else []), __file__, "--train", *self.words]
        variables = {
            "TMPDIR": str(self.temporary),
            "GLUON_PARALLEL_FLIGHT_RECORDER": str(self.folder / "recorder"),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        # A limit for the sizes of files is not the log's.
        reading, writing = os.pipe()
        self.show = subprocess.Popen(["cat"], stdin=reading, stdout=self.log, start_new_session=True)
        process = subprocess.Popen(
            argv, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing,
            start_new_session=True, cwd=self.folder,
        )  # fmt: skip
        os.close(reading)
        os.close(writing)
        return process

    # what is there

    def said(self) -> str:
        return Path(self.log.name).read_text("utf-8", "replace")

    def steps(self) -> int:
        return self.said().count("step ")

    def everybody(self) -> list[int]:
        found = [self.process.pid, *below(self.process.pid)] if self.process.poll() is None else []
        self.used |= shared_memory(found)
        return found

    def trainings(self) -> dict[int, int]:
        """The processes that train, without workers of loaders: their numbers by their ranks."""
        found = [one for one in self.everybody() if "--train" in words_of(one) and " launch " not in words_of(one)]
        known = parents()
        mine = [one for one in found if known.get(one) not in found]
        return {
            int(rank_of(one) or 0): one
            for one in mine
            if "agent" not in words_of(one) and "prterun" not in words_of(one)
        }

    def loader_workers(self) -> list[int]:
        return [one for main in self.trainings().values() for one in below(main)]

    # what must happen

    def until(self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not condition():
            self.everybody()
            if self.process.poll() is not None:
                raise Wrong(f"it ended with {self.process.returncode} before {what}")
            if time.monotonic() > end:
                raise Wrong(f"not within {seconds:g} s: {what}")
            time.sleep(0.05)

    def more_steps(self, number: int = 4) -> None:
        wanted = self.steps() + number
        self.until(lambda: self.steps() >= wanted, f"{number} more steps")

    def ended(self, *codes: int, named: str = "") -> None:
        """It ends by itself, with one of these statuses, and says this."""
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            if time.monotonic() > end:
                raise Wrong(f"it is still there after {PATIENCE:g} s")
            time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.show.wait(10)  # longer where somebody is left
        if self.process.returncode not in codes:
            raise Wrong(f"it ended with {self.process.returncode}, expected {' or '.join(map(str, codes))}")
        if not re.search(named, self.said()):
            raise Wrong(f"nothing says {named!r}")

    def stopped(self, number: int) -> None:
        """It stops by this signal, with a checkpoint of the step at which it says so."""
        self.ended(128 + number, -number)
        everything = [
            self.said(),
            *(path.read_text("utf-8", "replace") for path in (self.folder / "logs").glob("*.log")),
        ]
        said = r"stopped (?:in epoch \d+, )?after ((?:step|epoch) \d+); (\S+) has everything"
        found = re.findall(said, "\n".join(everything))
        if not found:
            raise Wrong("it does not say at which step it has stopped")
        where, path = found[-1]  # the logs have those of earlier starts, too
        try:
            gp.archive.read(path)
        except gp.errors.CheckpointError as error:
            raise Wrong(f"after {where}: {error}") from None

    def goes_on(self) -> None:
        """It makes more steps, and stops when it is asked to."""
        self.more_steps()
        number = self.chosen.choice(STOPS)
        self.process.send_signal(number)
        self.stopped(number)

    def leaves_nothing(self) -> list[str]:
        """What is left behind; processes are ended."""
        end = time.monotonic() + 10
        while (processes := set(below(os.getpid())) - BUSY) and time.monotonic() < end:
            time.sleep(0.05)
        left = [f"process {one}: {words_of(one)[:100]}" for one in processes]
        for one in processes:
            with contextlib.suppress(OSError):
                os.kill(one, signal.SIGKILL)
        left += [name for name in self.used if os.path.exists(name)]
        left += [f"tmp/{path.name}" for path in self.temporary.iterdir() if not path.name.startswith("matplotlib-")]
        return left + [f"run/{path.name}" for path in self.run.glob(".*")]

    def start_again(self) -> None:
        """Start the same training once more, and stop it after some steps: what was left must be gone."""
        self.log.truncate(0)
        self.log.seek(0)
        self.process = self.start(3)
        self.goes_on()


# what happens to a training ---------------------------------------------------------------------------------------


def send(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def signal_to_all(one: Try) -> None:
    number = one.chosen.choice(STOPS)
    send(one.everybody(), number)
    one.stopped(number)


def signal_to_group(one: Try) -> None:
    number = one.chosen.choice(STOPS)
    os.killpg(one.process.pid, number)
    one.stopped(number)


def signal_to_first(one: Try) -> None:
    number = one.chosen.choice(STOPS)
    one.process.send_signal(number)
    one.stopped(number)


def signal_to_process(one: Try) -> None:
    rank, process = one.chosen.choice(sorted(one.trainings().items()))
    send([process], signal.SIGTERM)
    if one.situation.least and rank:
        one.until(
            lambda: bool(re.search(rf"rank {rank} .*got SIGTERM from outside", one.said())), f"the loss of rank {rank}"
        )
        one.goes_on()
    else:
        one.stopped(signal.SIGTERM)


def lost(one: Try, rank: int, words: str) -> None:
    """The process of this rank is lost by what `words` say."""
    if one.situation.least:
        one.until(lambda: bool(re.search(rf"rank {rank} .*{words}", one.said())), f"the loss of rank {rank}")
        one.goes_on()
    else:
        one.ended(1, 137, named=rf"error: rank {rank} .*{words}")


def kill_process(one: Try) -> None:
    rank, process = one.chosen.choice(sorted(one.trainings().items()))
    send([process], signal.SIGKILL)
    if one.situation.launched:
        lost(one, rank, "was killed by SIGKILL")
    else:
        one.ended(-signal.SIGKILL)
        one.start_again()


def stop_process(one: Try) -> None:
    rank, process = one.chosen.choice(sorted(one.trainings().items()))
    send([process], signal.SIGSTOP)
    lost(one, rank, "(has been stopped|made no step)")


def pause_first(one: Try) -> None:
    """SIGSTOP, and SIGCONT after a while, as Ctrl-Z and ``fg``."""
    one.process.send_signal(signal.SIGSTOP)
    time.sleep(one.chosen.uniform(0, 4))
    one.process.send_signal(signal.SIGCONT)
    one.goes_on()


def kill_launcher(one: Try) -> None:
    one.process.kill()
    one.ended(-signal.SIGKILL)


def kill_mpirun(one: Try) -> None:
    """Processes that go on after a loss do so without mpirun, too."""
    send([process for process in one.everybody() if "prterun" in words_of(process).partition(" ")[0]], signal.SIGKILL)
    if one.situation.least:
        one.goes_on()
    else:
        one.ended(1, 137, named="error: mpirun")


def kill_agent(one: Try) -> None:
    rank, process = one.chosen.choice(sorted(one.trainings().items()))
    send([parents()[process]], signal.SIGKILL)
    lost(one, rank, "")


def kill_worker(one: Try) -> None:
    """A loader's worker: its batch may be lost, and then the loader gives up after its limit."""
    send([one.chosen.choice(one.loader_workers())], signal.SIGKILL)
    began, steps = time.monotonic(), one.steps()
    while time.monotonic() < began + 3 * LIMIT and one.process.poll() is None and one.steps() < steps + 60:
        time.sleep(0.05)
    if one.process.poll() is None:
        one.goes_on()
    else:
        one.ended(1, named="(?i)worker|timed? ?out")


def strangers(one: Try) -> None:
    """Connections that say nothing, or nonsense, to every port at which a process listens."""
    every = [*ports(one.everybody())]
    if not every:
        raise Wrong("nobody listens")
    noise = bytes(one.chosen.randrange(256) for _ in range(1000))
    opened = []
    try:
        for address in every:
            for text in (SILENCE, LINE, WEB, noise):
                with contextlib.suppress(OSError):
                    connection = socket.create_connection(address, timeout=1)
                    opened.append(connection)
                    connection.sendall(text)
        one.goes_on()
    finally:
        for connection in opened:
            connection.close()


def full_disk(one: Try) -> None:
    one.ended(1, 2, named=OURS)


SITUATIONS = [
    Situation(launched, workers, least)
    for launched in (False, True)
    for workers in (0, 2)
    for least in ((0, 1) if launched else (0,))
]
ALWAYS: Callable[[Situation], bool] = lambda situation: True  # noqa: E731
LAUNCHED: Callable[[Situation], bool] = lambda situation: situation.launched  # noqa: E731
EVENTS = {  # what happens: (what does it, in which situations)
    "a signal to all": (signal_to_all, ALWAYS),
    "a signal to the group": (signal_to_group, ALWAYS),
    "a signal to the first": (signal_to_first, ALWAYS),
    "SIGTERM to a process": (signal_to_process, ALWAYS),
    "KILL to a process": (kill_process, ALWAYS),
    "STOP to a process": (stop_process, LAUNCHED),
    "STOP and CONT to the first": (pause_first, ALWAYS),
    "KILL to the launcher": (kill_launcher, LAUNCHED),
    "KILL to mpirun": (kill_mpirun, LAUNCHED),
    "KILL to an agent": (kill_agent, LAUNCHED),
    "KILL to a loader's worker": (kill_worker, lambda situation: situation.workers > 0),
    "strangers": (strangers, LAUNCHED),
    "a full disk": (full_disk, lambda situation: not situation.workers),
}
MAY_LEAVE = [event for event in EVENTS if "KILL" in event or "STOP to" in event]  # until the next start
BUSY: set[int] = set()  # processes that keep the machine busy


def attempt(event: str, situation: Situation, chosen: random.Random, folder: Path) -> tuple[list[str], str]:
    """What is wrong with a try, and what its processes have said."""
    happen, _ = EVENTS[event]
    one, wrong = Try(folder, situation, chosen, chosen.choice((1, 300, 1000)) if happen is full_disk else 0), []
    try:
        one.until(lambda: one.steps() >= 5, "5 steps")
        time.sleep(chosen.uniform(0, 1.5))
        happen(one)
    except Wrong as error:
        wrong.append(str(error))
    said, left = one.said(), one.leaves_nothing()
    if left and event in MAY_LEAVE and not any(name.startswith("process") for name in left):
        try:
            one.start_again()
        except Wrong as error:
            wrong.append(f"the next start: {error}")
        left = one.leaves_nothing()
    one.process.wait()
    one.log.close()
    return wrong + [f"left: {name}" for name in left], said


def keep_busy(number: int) -> list[subprocess.Popen]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    BUSY.update(loop.pid for loop in loops)
    return loops


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="after which no more try begins (10)")
    parser.add_argument("--only", help="part of the names of what happens")
    parser.add_argument("--situation", help='such as "launched, with workers, goes on"')
    parser.add_argument("--seed", type=int, default=0, help="of the first try; a try has a seed of its own (0)")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside (0)")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)  # folder, workers, bytes of a file
    options = parser.parse_args()
    if options.train:
        train(options.train[0], *map(int, options.train[1:]))
        return 0
    ctypes.CDLL(None).prctl(36, 1)  # orphans of what this process starts become its children, and are found
    for number in STOPS:  # what is started in the background or by nohup ignores some, and so would a launcher
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    pairs = [
        (event, situation)
        for event, (_, possible) in EVENTS.items()
        for situation in SITUATIONS
        if possible(situation) and (options.only or "") in event and options.situation in (None, str(situation))
    ]
    tries: collections.Counter = collections.Counter()
    right: collections.Counter = collections.Counter()
    loops, end, seed = keep_busy(options.busy), time.monotonic() + 60 * options.minutes, options.seed
    try:
        while time.monotonic() < end:
            turn, place = divmod(seed, len(pairs))
            # Each comes once before one comes again.
            event, situation = pair = random.Random(turn).sample(pairs, len(pairs))[place]
            with tempfile.TemporaryDirectory(prefix="stops-", ignore_cleanup_errors=True) as name:
                began = time.monotonic()
                wrong, said = attempt(event, situation, random.Random(seed), Path(name))
            tries[pair] += 1
            right[pair] += not wrong
            print(
                f"{seed}: {event}, {situation}: {'; '.join(wrong) or 'right'} ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
            if wrong:
                print(*(f"    {line}" for line in said.splitlines()[-15:] if "step" not in line), sep="\n", flush=True)
            seed += 1
            with contextlib.suppress(ChildProcessError):  # orphans
                while (child := os.waitpid(-1, os.WNOHANG)[0]) and child not in BUSY:
                    pass
    finally:
        for loop in loops:
            loop.kill()
    for event in EVENTS:
        for situation in SITUATIONS:
            if tries[event, situation]:
                print(f"| {event} | {situation} | {right[event, situation]} of {tries[event, situation]} |")
    print(f"{right.total()} of {tries.total()} tries are right")
    return right != tries


if __name__ == "__main__":
    sys.exit(main())
