"""Lose processes of a training and have others join in their place; compare the weights with an undisturbed training.

    python scripts/studies/joins.py --runs 20
    python scripts/studies/joins.py --net resnet20 --runs 5 --kinds replaced first
    python scripts/studies/joins.py --kinds rounds --runs 1

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
from typing import Any

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lost_processes import BATCH, LARGEST, NETS, SAMPLES, parameters

meeting: Any = sys.modules["gluon_parallel.survive.meeting"]  # in whose middle processes are ended
IS_NEW = "GLUON_PARALLEL_JOINS" in os.environ
EPOCHS = 1000  # more than any run has
MERGED = "_merged"  # the function of `meeting` in which old and new processes become one group
WAIT = 0.3  # seconds between two steps while a process is missing, so that one can start before the training ends


def orders_of(kind: str, chosen: random.Random, processes: int) -> tuple[list[list], int]:
    """What happens in a run: (process, moment, signal) each, and how many processes join."""
    step, last, delay = chosen.randint(4, 20), processes - 1, chosen.uniform(0, 0.05)
    kill, one = "SIGKILL", [chosen.randint(1, last), step, "SIGKILL"]
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
    "old dies while new starts", "old dies in meeting", "rounds",
]  # fmt: skip


def train(name: str, dtype: str, file: str, num_steps: int, orders: list) -> None:
    """Train as one of several processes, to which happens what `orders` say for it."""
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
    mine = [(str(moment), getattr(signal, what)) for who, moment, what in orders if who == number]

    def happen(what):
        os.kill(os.getpid(), what)

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
    num = int(os.environ.get("GLUON_PARALLEL_NUM_WORKERS", 1))
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
            time.sleep(WAIT * (store.num_workers < num))
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


def launch(options, folder: Path, orders: list, joining: bool = True):
    """(weights, what process 0 noted, result, what the launcher said)"""
    file, logs = folder / "weights.npz", folder / "logs"
    for path in [*folder.glob("weights*"), *logs.glob("*")]:
        path.unlink()
    words = ["--net", options.net, "--dtype", options.dtype, "--file", str(file), "--orders", json.dumps(orders)]
    words += ["--steps", str(options.steps)]
    result = gp.launch.launch(
        __file__, words, options.processes, devices="cpu:1", timeout=options.timeout, logs=str(logs), live=False,
        announces=options.verbose, min_processes=1 if joining else None,
        max_processes=options.processes if joining else None,
    )  # fmt: skip
    said = sorted(
        {line for log in logs.glob("rank-*.log") for line in log.read_text().splitlines() if "gluon-p" in line}
    )
    weights = dict(np.load(file)) if file.exists() else {}
    noted = json.loads(Path(f"{file}.json").read_text()) if weights else {"sizes": [], "lengths": [], "memory": []}
    return weights, noted, result, said


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
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS[:-1], help="what happens (all but rounds)")
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
        train(options.net, options.dtype, options.file, options.steps, orders)
        return 0
    chosen, table, is_right = random.Random(options.seed), [], True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected, _, result, _ = launch(options, folder, [], joining=False)
        if result.exit_code or not expected:
            print(f"the undisturbed training has failed: {result.failure}")
            return 1
        for kind in options.kinds:
            good, largest = 0, 0.0
            all_held: list[float] = []
            ratios: list[float] = []
            for run in range(options.runs):
                orders, wanted = orders_of(kind, chosen, options.processes)
                weights, noted, result, said = launch(options, folder, orders)
                found, left = difference(weights, expected), left_behind(folder)
                held = [
                    float(one) for line in said for one in re.findall(r"joined after.*go on after ([\d.]+) s", line)
                ]
                lengths, fewer = np.array(noted["lengths"][1:]), np.array(noted["sizes"][1:]) < options.processes
                usual = np.median(lengths) if len(lengths) else np.nan
                # Without the steps in which somebody was lost or met
                same = np.diff(noted["sizes"]) == 0 if len(lengths) else np.array([], bool)
                meanwhile = lengths[fewer & same] if len(lengths) else np.array([])
                ratio = meanwhile.max() / usual if len(meanwhile) else np.nan
                right = result.exit_code == 0 and found <= LARGEST[options.dtype] and not left
                right = right and len(held) >= wanted
                good += right
                is_right &= right
                all_held, largest = [*all_held, *held], max(largest, found)
                ratios.append(ratio)
                memory = f", memory {noted['memory']} MB" if kind == "rounds" else ""
                print(
                    f"{kind}, {good} of {run + 1}: {orders}: difference {found:.1e}, status {result.exit_code}, held "
                    f"{held} s, longest step {ratio:.1f} usual ones, {left} left behind{memory}", flush=True,
                )  # fmt: skip
                if not right:
                    print(*said, result.failure, sep="\n    ", flush=True)
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
