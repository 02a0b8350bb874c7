"""Lose processes of a training and have others join in their place; compare the weights with an undisturbed training.

    python scripts/studies/joins.py --runs 20
    python scripts/studies/joins.py --net resnet20 --runs 5 --kinds replaced first
    python scripts/studies/joins.py --kinds rounds --runs 1
    python scripts/studies/joins.py --kinds "host lost" "host cut off" grow shrink      as root, on hosts of namespaces

Each run is of one kind; what happens, happens at a random step, or at a random moment of the meeting. A line per run
says the largest difference of a weight, relative to the largest weight of its array, how long those that train were
held to meet each new process, their longest step while it started against their usual one, and what was left behind. A
table of all kinds follows.

Weights are float64. In float32, some runs of 200 steps leave the undisturbed path in one step, all for the same other
one, and end 0.07 apart: where rounding decides the sign of an input of a ReLU, sums in another order decide otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
from hosts import hosts
from lost_processes import BATCH, LARGEST, NETS, SAMPLES, parameters

meeting: Any = sys.modules["gluon_parallel.survive.meeting"]  # in whose middle processes are ended
IS_NEW = "GLUON_PARALLEL_JOINS" in os.environ
EPOCHS = 1000  # more than any run has
MERGED = "_merged"  # the function of `meeting` in which old and new processes become one group
WAIT = 0.3  # seconds between two steps while a process is missing, so that one can start before the training ends
SAYS = "SAYS"  # in place of a signal: the process says so, and its host is lost, or the list of hosts changes
NOW = "it is time"


class OnHosts(NamedTuple):
    """A kind whose processes are on hosts with a place for one each, of which the first two begin."""

    listed: list[int]  # their numbers in the list
    happens: Callable[[Any, Callable[[list[int]], None]], None]  # gets the hosts, and what writes the list
    size: int  # how many processes there are at the end


ON_HOSTS = {
    "host lost": OnHosts([0, 1, 2], lambda made, write: made.lose(1), 2),
    "host cut off": OnHosts([0, 1, 2], lambda made, write: made.unplug(1), 2),
    "grow": OnHosts([0, 1], lambda made, write: write([0, 1, 2]), 3),
    "shrink": OnHosts([0, 1], lambda made, write: write([0]), 1),
}


def orders_of(kind: str, chosen: random.Random, processes: int) -> tuple[list[list], int]:
    """What happens in a run: (process, moment, signal) each, and how many processes join."""
    step, last, delay = chosen.randint(4, 20), processes - 1, chosen.uniform(0, 0.05)
    kill, one = "SIGKILL", [chosen.randint(1, last), step, "SIGKILL"]
    if kind in ON_HOSTS:
        return [[1, step, SAYS]], int(kind != "shrink")
    kinds = {
        "replaced": ([one], 1),
        "first": ([[0, step, kill]], 1),
        "two": ([[0, step, kill], [last, step + chosen.randint(0, 3), kill]], 2),
        "new dies before": ([one, [processes, "begin", kill]], 1),
        "new stopped before": ([one, [processes, "begin", "SIGSTOP"]], 1),
        "new dies in meeting": ([one, [processes, f"meet {delay}", kill]], 1),
        "new dies after": ([one, [processes, f"after {chosen.randint(0, 8)}", kill]], 2),
        "old dies while new starts": ([[last, step, kill], [0, f"late {chosen.uniform(0, 4)}", kill]], 2),
        "old dies in meeting": ([[last, step, kill], [chosen.randint(0, last - 1), f"meet {delay}", kill]], 2),
        "rounds": ([[last, step, kill], *([last + number, "after 5", kill] for number in range(1, 10))], 10),
    }
    return kinds[kind]


KINDS = [
    "replaced", "first", "two", "new dies before", "new stopped before", "new dies in meeting", "new dies after",
    "old dies while new starts", "old dies in meeting", "rounds", *ON_HOSTS,
]  # fmt: skip


def train(name: str, dtype: str, file: str, num_steps: int, orders: list, num: int) -> None:
    """Train as one of several processes, to which happens what `orders` say for it; `num` are there in the end."""
    mx.random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (the generator that MXNet's initializers use)
    rng = np.random.default_rng(1)
    make_net, shape, _ = NETS[name]
    images, labels = rng.standard_normal((SAMPLES, *shape)), rng.integers(0, 10, SAMPLES)
    data = gluon.data.ArrayDataset(mx.nd.array(images, dtype=dtype), mx.nd.array(labels, dtype=dtype))
    net = make_net()
    net.cast(dtype)
    net.initialize(mx.init.Xavier(), ctx=gp.devices("auto"))
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.02, "momentum": 0.9})
    number = int(os.environ.get("GLUON_PARALLEL_RANK", 0))
    mine = [(str(moment), what) for who, moment, what in orders if who == number]

    def happen(what):
        if what == SAYS:
            print(NOW, flush=True)
        else:
            os.kill(os.getpid(), getattr(signal, what))

    for moment, what in mine:
        word, _, after = moment.partition(" ")
        if word == "begin":
            happen(what)
        elif word == "meet":
            name_of_call = "accept" if IS_NEW else "connect"
            meet = getattr(meeting, name_of_call)

            def meet_and_happen(*arguments, delay=float(after), what=what, meet=meet):
                if not IS_NEW:
                    threading.Timer(delay, happen, [what]).start()
                return meet(*arguments)

            setattr(meeting, name_of_call, meet_and_happen)
            if IS_NEW:
                merged = getattr(meeting, MERGED)

                def merge_and_happen(*arguments, delay=float(after), what=what, merged=merged, **options):
                    threading.Timer(delay, happen, [what]).start()
                    return merged(*arguments, **options)

                setattr(meeting, MERGED, merge_and_happen)
    store = gp.kvstore.create("auto")
    loader = gluon.data.DataLoader(data, BATCH, shuffle=True)
    training, loader = gp.prepare(
        net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, loader, store=store, sync_batch_norm=True
    )
    first = training.num_steps
    sizes: list[int] = []
    lengths: list[float] = []
    memory: list[int] = []
    begin = time.perf_counter()
    for _ in training.epochs(EPOCHS, progress=False):
        for x, y in loader:
            for moment, what in mine:
                word, _, after = moment.partition(" ")
                if word == str(training.num_steps) or (word, after) == ("after", str(training.num_steps - first)):
                    happen(what)
                if word == "late" and store.num_workers < num and not hasattr(training, "timer"):
                    training.timer = threading.Timer(float(after), happen, [what])
                    training.timer.start()
            training.step(x, y)
            if store.num_workers > (sizes[-1] if sizes else store.num_workers):
                memory.append(int(Path("/proc/self/statm").read_text().split()[1]) // 256)
            sizes.append(store.num_workers)
            lengths.append(time.perf_counter() - begin)
            time.sleep(WAIT * (store.num_workers != num))
            begin = time.perf_counter()
            if training.num_steps == num_steps:
                break
        if training.num_steps == num_steps:
            break
    if store.rank == 0:
        Path(f"{file}.json").write_text(json.dumps({"sizes": sizes, "lengths": lengths, "memory": memory}))
        np.savez(file, **{key: one.data(one.list_ctx()[0]).asnumpy() for key, one in parameters(net).items()})


def difference(weights: dict, expected: dict) -> float:
    """The largest difference of a weight, relative to the largest weight of its array."""
    return max((np.abs(weights[n] - expected[n]).max() / np.abs(expected[n]).max() for n in weights), default=np.inf)


def launch(options, folder: Path, orders: list, kind: str = ""):
    """(weights, what process 0 noted, exit status, the failure, what the launcher said); of no kind, nobody joins."""
    file, logs = folder / "weights.npz", folder / "logs"
    for path in [*folder.glob("weights*"), *logs.glob("*")]:
        path.unlink()
    size = ON_HOSTS[kind].size if kind in ON_HOSTS else options.processes
    words = ["--net", options.net, "--dtype", options.dtype, "--file", str(file), "--orders", json.dumps(orders)]
    words += ["--steps", str(options.steps), "--processes", str(size)]
    failure: object
    if kind in ON_HOSTS:
        status, failure = launch_on_hosts(options, ON_HOSTS[kind], folder, words)
    else:
        result = gp.launch.launch(
            __file__, words, options.processes, devices="cpu:1", timeout=options.timeout, logs=str(logs), live=False,
            announces=options.verbose, min_processes=1 if kind else None,
            max_processes=options.processes if kind else None,
        )  # fmt: skip
        status, failure = result.exit_code, result.failure
    said = sorted(
        {line for log in logs.glob("rank-*.log") for line in log.read_text().splitlines() if "gluon-p" in line}
    )
    weights = dict(np.load(file)) if file.exists() else {}
    noted = json.loads(Path(f"{file}.json").read_text()) if weights else {"sizes": [], "lengths": [], "memory": []}
    if kind in ON_HOSTS and noted["sizes"][-1:] != [size]:
        status, failure = 1, f"there are not {size} processes at the end: {failure}"
    return weights, noted, status, failure, said


def launch_on_hosts(options, kind: OnHosts, folder: Path, words: list[str]) -> tuple[int, str]:
    """The status and the output of a launch on the first of three hosts."""
    listed, log = folder / "hosts", folder / "logs" / "rank-1.log"
    ended = threading.Event()
    with hosts(3) as made:

        def write(numbers):
            listed.write_text("".join(f"{made.names[number]} slots=1\n" for number in numbers))

        def wait_and_happen():
            while not ended.wait(0.02):
                if log.exists() and NOW in log.read_text():
                    kind.happens(made, write)
                    return

        write(kind.listed)
        watching = threading.Thread(target=wait_and_happen)
        watching.start()
        most = max(2, kind.size)
        command = [sys.executable, "-m", "gluon_parallel", "launch", "-n", 2, "--min-processes", 1, "--max-processes"]
        command += [most, "--rsh", made.shell, "--hostfile", listed, "--devices", "cpu:1", "--quiet", "--timeout"]
        command += [options.timeout, "--logs", folder / "logs", __file__, *words]
        try:
            done = made.run(0, [*map(str, command)], seconds=600)
        finally:
            ended.set()
            watching.join()
        if options.verbose:
            print(done.stdout, done.stderr)
        return done.returncode, done.stdout + done.stderr


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
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=KINDS[: KINDS.index("rounds")],
        help="what happens",
    )
    parser.add_argument("--processes", type=int, default=3, help="that begin (3)")
    parser.add_argument("--steps", type=int, default=300, help="of each run (300)")
    parser.add_argument("--seed", type=int, default=0, help="of what happens when (0)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds, as of gluon-parallel launch (60)")
    parser.add_argument("--verbose", action="store_true", help="show what the launcher says")
    for name in ("--file", "--orders"):  # of one process
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.file:
        orders = json.loads(options.orders)
        train(options.net, options.dtype, options.file, options.steps, orders, options.processes)
        return 0
    chosen, table, is_right = random.Random(options.seed), [], True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected, _, status, failure, _ = launch(options, folder, [])
        if status or not expected:
            print(f"the undisturbed training has failed: {failure}")
            return 1
        for kind in options.kinds:
            good, largest = 0, 0.0
            all_held: list[float] = []
            ratios: list[float] = []
            for run in range(options.runs):
                orders, wanted = orders_of(kind, chosen, options.processes)
                weights, noted, status, failure, said = launch(options, folder, orders, kind)
                found, left = difference(weights, expected), left_behind(folder)
                held = [
                    float(one) for line in said for one in re.findall(r"joined after.*go on after ([\d.]+) s", line)
                ]
                last = noted["sizes"][-1:] or [0]
                lengths, fewer = np.array(noted["lengths"][1:]), np.array(noted["sizes"][1:]) != last[0]
                usual = np.median(lengths) if len(lengths) else np.nan
                # Without the steps in which somebody was lost or met
                same = np.diff(noted["sizes"]) == 0 if len(lengths) else np.array([], bool)
                meanwhile = lengths[fewer & same] if len(lengths) else np.array([])
                ratio = meanwhile.max() / usual if len(meanwhile) else np.nan
                right = status == 0 and found <= LARGEST[options.dtype] and not left
                right = right and len(held) >= wanted
                good += right
                is_right &= right
                all_held, largest = [*all_held, *held], max(largest, found)
                ratios.append(ratio)
                memory = f", memory {noted['memory']} MB" if kind == "rounds" else ""
                print(
                    f"{kind}, {good} of {run + 1}: {orders}: difference {found:.1e}, status {status}, held "
                    f"{held} s, longest step {ratio:.1f} usual ones, {left} left behind{memory}", flush=True,
                )  # fmt: skip
                if not right:
                    print(*said, failure, sep="\n    ", flush=True)
            table.append((kind, good, options.runs, largest, all_held, np.nanmedian(ratios)))
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
