"""Lose processes of a training and have others join in their place; compare the weights with an undisturbed training.

    python scripts/studies/joins.py --runs 20
    python scripts/studies/joins.py --net resnet20 --runs 5 --kinds replaced first
    python scripts/studies/joins.py --kinds rounds --runs 1
    python scripts/studies/joins.py --kinds "host lost" "host cut off"      as root, on hosts of namespaces
    python scripts/studies/joins.py --net wide --megabits 1000 --kinds "killed on a host"                   as root, too

Each run is of one kind; what happens, happens at a random step, or at a random moment of the meeting. A line per run
says the largest difference of a weight, relative to the largest weight of its array, how long those that train were
held to meet each new process, their longest step while it started, and what was left behind. The logs of a run that was
wrong are kept. A table of all kinds follows. The longest step is given in usual ones: the median of those of as many
processes, which are left of as many, where no other comes. The longest of these is more than 1, too, and shown first.

Weights are float64. In float32, some runs of 200 steps leave the undisturbed path in one step, all for the same other
one, and end 0.07 apart: where rounding decides the sign of an input of a ReLU, sums in another order decide otherwise.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
import hosts as host_namespaces
from lost_processes import BATCH, LARGEST, NETS, SAMPLES, parameters

meeting: Any = sys.modules["gluon_parallel.survive.meeting"]  # in whose middle processes are ended
pmix: Any = sys.modules["gluon_parallel.kvstore.mpi.pmix"]  # which starts new ones
places: Any = sys.modules["gluon_parallel.launch.joins"]  # which decides what places get one
IS_NEW = "GLUON_PARALLEL_JOINS" in os.environ
EPOCHS = 1000  # more than any run has
NOW = "it is time that this process's host is lost"
NOTED = "sizes", "waits", "lengths", "memory"  # what process 0 writes: per step, and per new process
WAIT = 0.3  # seconds between two steps while a process is missing, so that one can start before the training ends


def orders_of(kind: str, chosen: random.Random, processes: int) -> tuple[list[list], int]:
    """What happens in a run: (process, moment, what) each, and how many processes join.

    A moment is a number of steps, or a word, and maybe a number: of seconds, or steps, behind it. What happens is a
    signal, or "stop" (of the launcher, by SIGTERM), "full" (mpirun starts no process), "slots 2" (in the list that is
    watched), "lose" or "unplug" (of the process's host: all of it ends, or its cable is taken away).
    """
    step, last, delay = chosen.randint(4, 20), processes - 1, chosen.uniform(0, 0.05)
    kill, victim = "SIGKILL", chosen.randint(min(1, last), last)
    one: list[Any] = [victim, step, kill]
    kinds = {
        "replaced": ([one], 1),
        "first": ([[0, step, kill]], 1),
        "two": ([[0, step, kill], [last, step + chosen.randint(0, 3), kill]], 2),
        "two at once": ([[0, step, kill], [last, step, kill]], 2),
        "new dies before": ([one, [processes, "begin", kill]], 1),
        "new stopped before": ([one, [processes, "begin", "SIGSTOP"]], 1),
        "new dies in meeting": ([one, [processes, f"meet {delay}", kill]], 1),
        "new dies after": ([one, [processes, f"after {chosen.randint(0, 8)}", kill]], 2),
        "old dies while new starts": ([[last, step, kill], [0, f"late {chosen.uniform(0, 4)}", kill]], 2),
        "old dies in meeting": ([[last, step, kill], [chosen.randint(0, max(0, last - 1)), f"meet {delay}", kill]], 2),
        "stop while new starts": ([one, [victim - 1, f"late {chosen.uniform(0, 4)}", "stop"]], 0),
        "stop in meeting": ([[last, step, kill], [0, f"meet {delay}", "stop"]], 0),
        "no slots": ([one, *([number, "begin", "full"] for number in range(processes))], 1),
        "grow": ([[0, step, f"slots {processes + 1}"]], 1),
        "grow twice": ([[0, step, f"slots {processes + 1}"], [0, 2 * step, f"slots {processes + 2}"]], 2),
        "double": ([[0, step, f"slots {2 * processes}"]], processes),
        "shrink": ([[0, step, f"slots {processes - 1}"]], 0),
        "host lost": ([[last, step, "lose"]], 1),
        "host cut off": ([[last, step, "unplug"]], 1),
        "killed on a host": ([[victim, f"{step} {chosen.uniform(0, 1)}", kill]], 1),
        "rounds": ([[last, step, kill], *([last + number, "after 5", kill] for number in range(1, 10))], 10),
    }
    return kinds[kind]


KINDS = [
    "replaced", "first", "two", "two at once", "new dies before", "new stopped before", "new dies in meeting",
    "new dies after", "old dies while new starts", "old dies in meeting", "stop while new starts", "stop in meeting",
    "no slots", "grow", "grow twice", "double", "shrink", "host lost", "host cut off", "killed on a host",
    "rounds",
]  # fmt: skip
ON_HOSTS = "host lost", "host cut off", "killed on a host"


class Orders:
    """What is to happen in this process, and when; see :func:`orders_of`."""

    def __init__(self, options, orders: list) -> None:
        self._launcher, self._hosts = options.launcher, Path(options.hosts)
        self._begun = Path(f"{options.file}.meets")  # is there when those that train begin to meet a new process
        number = int(os.environ.get("GLUON_PARALLEL_RANK", 0))
        self._mine: list[tuple] = [(*str(moment).split(), what) for who, moment, what in orders if who == number]
        connect = meeting.connect

        def meet(*arguments):
            self._begun.touch()
            self.start("meet")
            return connect(*arguments)

        meeting.connect = meet
        if IS_NEW:
            threading.Thread(target=self._wait, daemon=True).start()

    def num_wanted(self) -> int:
        """How many processes the list of hosts asks for."""
        return int(self._hosts.read_text().rpartition("=")[2])

    def _wait(self) -> None:
        begun = self._begun.stat().st_mtime if self._begun.exists() else 0  # of the meeting before
        while not (self._begun.exists() and self._begun.stat().st_mtime > begun):
            time.sleep(0.0005)
        self.start("meet")

    def at(self, *words: str) -> None:
        """Do what is to happen now."""
        for order in self._mine:
            if order[:-1] == words:
                self._do(order[-1])

    def start(self, word: str) -> None:
        """Do what is to happen so many seconds from now."""
        for order in [order for order in self._mine if order[0] == word and len(order) == 3]:
            self._mine.remove(order)
            threading.Timer(float(order[1]), self._do, order[2:]).start()

    def _do(self, what: str) -> None:
        if what == "stop":
            os.kill(self._launcher, signal.SIGTERM)
        elif what in ("lose", "unplug"):
            print(NOW, flush=True)
        elif what == "full":
            pmix._Program = functools.partial(self._too_many, pmix._Program)
        elif what.startswith("slots"):
            whole = self._hosts.with_suffix(".new")
            whole.write_text(f"localhost slots={what.split()[1]}")
            whole.replace(self._hosts)
        else:
            os.kill(os.getpid(), getattr(signal, what))

    def _too_many(self, make, *words):
        """Once, a program of which mpirun cannot start any process: there is no folder to start it in."""
        *first, _folder, number, info, num_info = words
        pmix._Program = make
        return make(*first, b"/there/is/no/such/folder", number, info, num_info)


def train(options, orders: list) -> None:
    """Train as one of several processes, to which happens what `orders` say for it."""
    happens, dtype, file = Orders(options, orders), options.dtype, options.file
    mx.random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (the generator that MXNet's initializers use)
    rng = np.random.default_rng(1)
    make_net, shape, _ = NETS[options.net]
    images, labels = rng.standard_normal((SAMPLES, *shape)), rng.integers(0, 10, SAMPLES)
    data = gluon.data.ArrayDataset(mx.nd.array(images, dtype=dtype), mx.nd.array(labels, dtype=dtype))
    net = make_net()
    net.cast(dtype)
    net.initialize(mx.init.Xavier(), ctx=gp.devices("auto"))
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.02, "momentum": 0.9})
    happens.at("begin")
    store = gp.kvstore.create("auto")
    loader = gluon.data.DataLoader(data, BATCH, shuffle=True)
    training, loader = gp.prepare(
        net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, loader, store=store, sync_batch_norm=True,
        run=f"{file}.run",
    )  # fmt: skip
    first = training.num_steps
    sizes: list[int] = []
    waits: list[bool] = []  # for others
    lengths: list[float] = []
    memory: list[int] = []
    for _ in training.epochs(EPOCHS, progress=False):
        begin = time.perf_counter()  # the end of an epoch is no step: whoever is process 0 then draws curves
        for x, y in loader:
            wanted = happens.num_wanted()
            happens.at(str(training.num_steps))
            happens.start(str(training.num_steps))
            happens.at("after", str(training.num_steps - first))
            if store.num_workers < wanted:
                happens.start("late")
            training.step(x, y)
            if store.num_workers > (sizes[-1] if sizes else store.num_workers):
                memory.append(int(Path("/proc/self/statm").read_text().split()[1]) // 256)
            sizes.append(store.num_workers)
            waits.append(store.num_workers < wanted)
            lengths.append(time.perf_counter() - begin)
            time.sleep(WAIT * (store.num_workers != wanted and not IS_NEW))
            begin = time.perf_counter()
            if training.num_steps == options.steps:
                break
        if training.num_steps == options.steps:
            break
    if store.rank == 0:
        Path(f"{file}.json").write_text(json.dumps(dict(zip(NOTED, (sizes, waits, lengths, memory)))))
        np.savez(file, **{key: one.data(one.list_ctx()[0]).asnumpy() for key, one in parameters(net).items()})


def difference(weights: dict, expected: dict) -> float:
    """The largest difference of a weight, relative to the largest weight of its array."""
    return max((np.abs(weights[n] - expected[n]).max() / np.abs(expected[n]).max() for n in weights), default=np.inf)


def launch(options, folder: Path, orders: list, joining: bool = True, on_hosts: bool = False):
    """(weights, what process 0 noted, result, what the launcher said)"""
    file, logs, hosts = folder / "weights.npz", folder / "logs", folder / "hosts"
    for path in [*folder.glob("weights*"), *logs.glob("*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    hosts.write_text(f"localhost slots={options.processes}")
    words = ["--net", options.net, "--dtype", options.dtype, "--file", str(file), "--steps", str(options.steps)]
    words += ["--launcher", str(os.getpid()), "--hosts", str(hosts)]

    def start(orders) -> Any:
        return gp.launch.launch(
            __file__, [*words, "--orders", json.dumps(orders)], options.processes, devices="cpu:1",
            timeout=options.timeout, logs=str(logs), live=False, announces=options.verbose,
            min_processes=1, max_processes=2 * options.processes if joining else None,
            hostfile=str(hosts) if joining else None,
        )  # fmt: skip

    result = launch_on_hosts(options, folder, words, orders) if on_hosts else start(orders)
    if result.exit_code == 128 + signal.SIGTERM and any(what == "stop" for *_, what in orders):
        result = start([])  # it goes on from its checkpoint
    said = sorted(
        {line for log in logs.glob("rank-*.log") for line in log.read_text().splitlines() if "gluon-p" in line}
    )
    weights = dict(np.load(file)) if file.exists() else {}
    noted = json.loads(Path(f"{file}.json").read_text()) if weights else {name: [] for name in NOTED}
    return weights, noted, result, said


def launch_on_hosts(options, folder: Path, words: list[str], orders: list) -> Any:
    """Launch on hosts with a place for one process each, one more than processes; that of the last one may be lost."""
    num, logs = options.processes, folder / "logs"
    log, ended = logs / f"rank-{num - 1}.log", threading.Event()
    with host_namespaces.hosts(num + 1, options.megabits) as made:

        def wait_and_lose():
            while not ended.wait(0.02):
                if log.exists() and NOW in log.read_text():
                    getattr(made, orders[0][-1])(num - 1)
                    return

        watching = threading.Thread(target=wait_and_lose)
        watching.start()
        options_of_launch = ["-n", num, "--min-processes", 1, "--max-processes", num, "--devices", "cpu:1", "--quiet"]
        command = made.launching(
            1, *options_of_launch, "--timeout", options.timeout, "--logs", logs, __file__, *words,
            "--orders", json.dumps(orders),
        )  # fmt: skip
        try:
            done = made.run(0, command, seconds=900)
        finally:
            ended.set()
            watching.join()
    if options.verbose:
        print(done.stderr)
    return types.SimpleNamespace(exit_code=done.returncode, failure=done.stderr)


class Usual:
    """The usual step of so many processes while no other one starts, measured when it is asked for."""

    def __init__(self, options, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._seconds: dict[int, float] = {}

    def seconds(self, num: int) -> float:
        """The median of the steps of the processes that are left when the others are killed."""
        if num not in self._seconds:
            orders: list[list] = [[number, 3, "SIGKILL"] for number in range(num, self._options.processes)]
            noted = launch(self._options, self._folder, orders, joining=False)[1]
            lengths = [seconds for size, seconds in zip(noted["sizes"], noted["lengths"]) if size == num][3:]
            self._seconds[num] = statistics.median(lengths)
            longest = max(lengths) / self._seconds[num]
            print(
                f"{num} processes alone: {self._seconds[num]:.3f} s a step, longest {longest:.1f} usual ones",
                flush=True,
            )
        return self._seconds[num]

    def longest(self, noted: dict) -> float:
        """The longest step while others were waited for, in usual ones; those in which somebody was lost or met not."""
        rows = [*zip(noted["sizes"], noted["waits"], noted["lengths"])][1:]
        most = self._options.processes  # the usual step of more is not known
        chosen = [now for before, now in zip(rows, rows[1:]) if now[1] and before[0] == now[0] <= most]
        return max((seconds / self.seconds(num) for num, _, seconds in chosen), default=np.nan)


def left_behind(file: Path) -> int:
    """How many processes of the last training are still there."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += str(file).encode() in path.read_bytes() and int(path.parent.name) != os.getpid()
        except OSError:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=list(NETS), default="lenet", help="what is trained (lenet)")
    parser.add_argument("--dtype", choices=list(LARGEST), default="float64", help="of weights (float64)")
    parser.add_argument("--runs", type=int, default=20, help="of each kind (20)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="what happens (all but 4)")
    parser.add_argument("--processes", type=int, default=3, help="that begin (3)")
    parser.add_argument("--steps", type=int, default=300, help="of each run (300)")
    parser.add_argument("--seed", type=int, default=0, help="of what happens when (0)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds, as of gluon-parallel launch (60)")
    parser.add_argument("--megabits", type=int, help="per second of each host (all that it can send)")
    parser.add_argument("--verbose", action="store_true", help="show what the launcher says")
    for name in ("--file", "--orders", "--hosts"):  # of one process
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--launcher", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.file:
        train(options, json.loads(options.orders))
        return 0
    options.kinds = options.kinds or [kind for kind in KINDS if kind not in (*ON_HOSTS, "rounds")]
    if options.megabits and not {*options.kinds} <= {*ON_HOSTS}:
        parser.error(f"--megabits is for {', '.join(ON_HOSTS)} alone")
    chosen, table, is_right = random.Random(options.seed), [], True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected, _, result, _ = launch(options, folder, [], joining=False)
        if result.exit_code or not expected:
            print(f"the undisturbed training has failed: {result.failure}")
            return 1
        usual = Usual(options, folder)
        for kind in options.kinds:
            good, largest = 0, 0.0
            if kind == "rounds":
                places._SO_OFTEN = np.inf  # else a place stays empty for minutes after three losses in a row
            all_held: list[float] = []
            ratios: list[float] = []
            for run in range(options.runs):
                orders, wanted = orders_of(kind, chosen, options.processes)
                weights, noted, result, said = launch(options, folder, orders, on_hosts=kind in ON_HOSTS)
                found, left = difference(weights, expected), left_behind(folder)
                held = [
                    float(one) for line in said for one in re.findall(r"joined after.*go on after ([\d.]+) s", line)
                ]
                ratio = np.nan if options.megabits else usual.longest(noted)  # the usual one is of this machine alone
                right = result.exit_code == 0 and found <= LARGEST[options.dtype] and not left
                right = right and len(held) >= wanted
                good += right
                is_right &= right
                all_held, largest = [*all_held, *held], max(largest, found)
                ratios += [ratio] if np.isfinite(ratio) else []
                memory = f", memory {noted['memory']} MB" if kind == "rounds" else ""
                print(
                    f"{kind}, {good} of {run + 1}: {orders}: difference {found:.1e}, status {result.exit_code}, held "
                    f"{held} s, longest step {ratio:.1f} usual ones, {left} left behind{memory}", flush=True,
                )  # fmt: skip
                if not right:
                    kept = tempfile.mkdtemp(prefix=f"{kind.replace(' ', '-')}-")  # the next run has others
                    shutil.copytree(folder / "logs", kept, dirs_exist_ok=True)
                    print(*said, result.failure, f"its logs are in {kept}", sep="\n    ", flush=True)
            longest = statistics.median(ratios) if ratios else np.nan
            table.append((kind, good, options.runs, largest, all_held, longest))
    print(f"\n{options.net}, {options.dtype}, {options.processes} processes\n")
    print(
        "| what happens | right | largest difference | held (median, longest) | longest step |\n| --- "
        + "| --- " * 4
        + "|"
    )
    for kind, good, runs, largest, held, ratio in table:
        times = f"{statistics.median(held):.2f} s, {max(held):.2f} s" if held else "-"
        print(f"| {kind} | {good} of {runs} | {largest:.1e} | {times} | {ratio:.1f} |")
    return not is_right


if __name__ == "__main__":
    sys.exit(main())
