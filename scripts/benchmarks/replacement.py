"""Measure how long a training pauses when a process is killed: a new one in its place, or a restart of all.

    python scripts/benchmarks/replacement.py              3 turns each of LeNet on 2 processes
    python scripts/benchmarks/replacement.py --quick      1 turn
    python scripts/benchmarks/replacement.py --torch-python .venv-torch/bin/python      with torchrun's restart

Process 1 kills itself after 60 steps, of which the last 30 are in no checkpoint. The pause is the time without a new
step: with ``--max-processes`` that of the loss and that of the meeting with the new process, while it starts the other
one trains; with ``--max-restarts`` until the steps since the last checkpoint have been made again.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import kvstore
import numpy as np
import rounds
import rows

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

WAYS: dict[str, dict[str, Any]] = {  # what is measured -> options of the launcher
    "replaced": {"min_processes": 1, "max_processes": 2},
    "gone on": {"min_processes": 1},
    "restarted": {"max_restarts": 1},
}
NAMES = {
    "replaced": "`--min-processes 1 --max-processes 2`", "gone on": "`--min-processes 1`",
    "restarted": "`--max-restarts 1`", "torchrun": "torchrun's `--max-restarts 1`",
}  # fmt: skip
EPOCH, DIES, LAST = 30, 60, 90  # steps
WAIT = 0.2  # seconds before each step while a process is missing, so that one can start before the training ends


def worker(options):
    """One process of a training, which notes when it has made a step that nobody had made before."""
    file, can_join = Path(options.file), "GLUON_PARALLEL_MAX_PROCESSES" in os.environ
    number, attempt = os.environ["GLUON_PARALLEL_RANK"], os.environ["GLUON_PARALLEL_RESTART"]
    net, shape, num = kvstore.network("lenet")
    net.initialize(mx.init.Xavier(), ctx=gp.devices("auto"))
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-3})
    batch = [mx.nd.random.uniform(shape=(num, *shape)), mx.nd.arange(num) % 10]  # reading data is no part of it
    loader = gluon.data.DataLoader(
        gluon.data.SimpleDataset(range(2 * num * EPOCH)), 2 * num, batchify_fn=lambda _: batch
    )
    training, train = gp.prepare(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, loader, run=gp.Run(f"{file}.run"))
    for _ in training.epochs(1000, progress=False):
        for data in train:
            training.step(*data)
            mx.nd.waitall()
            if training.num_steps == DIES + EPOCH - 1 and (number, attempt) == ("1", "0"):
                os.kill(os.getpid(), signal.SIGKILL)
            if training.rank == 0:
                with file.open("a") as lines:
                    lines.write(f"{training.num_steps} {time.time()} {training.store.num_workers} {attempt}\n")
            if training.num_steps >= DIES + LAST and (training.store.num_workers == 2 or not can_join):
                return
            time.sleep(WAIT * (can_join and training.store.num_workers < 2))
        training.end_epoch()


def pause(file):
    """Seconds without a new step, beyond what such steps take, where something has happened to a process."""
    columns = np.loadtxt(file).T
    steps, times, states = columns[0], columns[1], columns[2:]
    is_new = steps > np.maximum.accumulate(np.concatenate([[0], steps[:-1]]))
    times, states = times[is_new], states[:, is_new]
    lengths, changes = np.diff(times), np.any(np.diff(states) != 0, axis=0)
    return float((lengths[changes] - np.median(lengths)).sum())


def run_torch(python, file):
    """The same with PyTorch; False: its processes did not come together again after the restart, as in some runs."""
    command = [python, "-m", "torch.distributed.run", "--rdzv-backend", "static", "--master-addr", "127.0.0.1"]
    command += ["--master-port", rounds.free_port(), "--nproc-per-node", 2, "--max-restarts", 1]
    command += [Path(__file__).resolve().with_name("replacement_torch.py"), file, EPOCH, DIES + EPOCH - 1, DIES + LAST]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*map(str, command)], env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, said = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its processes
            _, said = process.communicate()
    if process.returncode:
        print(f"torchrun: the training did not go on: {said[-300:]}", file=sys.stderr)
    return process.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3, help="of each way (3)")
    parser.add_argument("--torch-python", help="a Python with PyTorch, whose torchrun takes part")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = rows.parse(parser, worker)
    taken: dict[str, list[float]] = {way: [] for way in (*WAYS, *["torchrun"] * bool(options.torch_python))}
    with tempfile.TemporaryDirectory() as name:
        for turn in range(1 if options.quick else options.turns):
            for way, how in WAYS.items():
                file = Path(name, f"{way} {turn}")
                result = gp.launch.launch(
                    __file__, ["--worker", "--file", str(file)], 2, devices="cpu:1", logs=f"{file}.logs", live=False,
                    announces=False, timeout=240, **how,
                )  # fmt: skip
                if result.exit_code:
                    sys.exit(f"{way}: {result.failure}")
                taken[way].append(pause(file))
            if options.torch_python:
                tries = (Path(name, f"torchrun {turn}.{number}") for number in range(5))
                good = next((file for file in tries if run_torch(options.torch_python, file)), None)
                if good is None:
                    sys.exit("torchrun: no restart in five tries")
                taken["torchrun"].append(pause(good))
    part = (
        f"{kvstore.TITLES['lenet']}, adam, 2 processes: pause when one is killed {EPOCH - 1} steps after a checkpoint"
    )
    rows.Rows(options).add(part, taken, "replaced", names=NAMES)


if __name__ == "__main__":
    main()
