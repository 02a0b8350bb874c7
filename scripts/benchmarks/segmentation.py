"""What a training step of segmentation costs: SyncBatchNorm against BatchNorm, two devices against one, reading images.

    python scripts/benchmarks/segmentation.py                        the small FCN, 16 images of 128 x 128
    python scripts/benchmarks/segmentation.py --size 64 --rounds 40
    python scripts/benchmarks/segmentation.py --only norm

The contestants take turns, so that what else the machine does affects all alike, and turns are compared. The first
steps of each do not count (`--warmup`, by default 150): until then MXNet's temporary buffers grow. One device with all
cores runs in a process of its own, because the engine's settings are made once per process.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import rows

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

NUM_CLASSES = 11
NORMS = {"BatchNorm": gluon.nn.BatchNorm, "SyncBatchNorm": gp.nn.SyncBatchNorm}


def make_step(norm: str, devices: list[mx.Context], size: int, batch_size: int) -> Any:
    """A function that runs one whole training step of the small FCN, and waits for it."""
    net = gp.models.SmallFCN(NUM_CLASSES, aux=True, norm_layer=NORMS[norm])
    net.initialize(mx.init.Xavier(magnitude=2), ctx=devices)
    net.hybridize()
    loss = gp.models.PixelLoss(aux_weight=0.4)
    loss.hybridize()
    step = gp.DataParallel(net, loss, gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-4}))
    random = np.random.default_rng(0)
    images = random.standard_normal((batch_size, 3, size, size)).astype("float32")
    masks = random.integers(0, NUM_CLASSES, (batch_size, size, size)).astype("int32")

    def run() -> None:
        step(images, masks)
        mx.nd.waitall()

    return run


def serve(spec: str, size: int, batch_size: int) -> None:
    """Time one step for each line on standard input: the process of one device."""
    step = make_step("SyncBatchNorm", gp.devices(spec), size, batch_size)
    for _ in sys.stdin:
        print(timed(step), flush=True)


def timed(function: Any) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def take_turns(sides: dict[str, Any], rounds: int, warmup: int) -> dict[str, list[float]]:
    """The seconds of each side in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(warmup + rounds):
        for name, side in sides.items():
            took = side()
            if number >= warmup:
                seconds[name].append(took)
    return seconds


def title(options: argparse.Namespace) -> str:
    return f"small FCN, {options.batch_size} images of {options.size} x {options.size}"


def compare_norms(devices: list[mx.Context], options: argparse.Namespace, results: rows.Rows) -> None:
    steps = {name: make_step(name, devices, options.size, options.batch_size) for name in NORMS}
    seconds = take_turns(
        {name: functools.partial(timed, step) for name, step in steps.items()}, options.rounds, options.warmup
    )
    results.add(f"{title(options)}, {options.devices}", seconds, "SyncBatchNorm")


def compare_devices(devices: list[mx.Context], options: argparse.Namespace, results: rows.Rows) -> None:
    several = make_step("SyncBatchNorm", devices, options.size, options.batch_size)
    alone = "cpu" if devices[0].device_type == "cpu" else str(devices[0]).replace("(", "@").rstrip(")")
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    command = [sys.executable, __file__, "--serve", alone, "--size", str(options.size)]
    with subprocess.Popen(
        [*command, "--batch_size", str(options.batch_size)], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        questions, answers = process.stdin, process.stdout
        assert questions is not None and answers is not None

        def one() -> float:
            questions.write("step\n")
            questions.flush()
            return float(answers.readline())

        seconds = take_turns({"one": one, "several": functools.partial(timed, several)}, options.rounds, options.warmup)
        questions.close()
    names = {"one": "one device, all cores", "several": f"{len(devices)} devices"}
    results.add(title(options), seconds, "several", names=names)


def share_of_reading(devices: list[mx.Context], options: argparse.Namespace, results: rows.Rows) -> None:
    """How long a batch takes to read, decode and normalise, beside the step that it is for."""
    folder = gp.datasets.scenes.write(options.data_root, num_train=64, num_test=1, size=options.size)
    step = make_step("SyncBatchNorm", devices, options.size, options.batch_size)
    sides: dict[str, Any] = {"step": functools.partial(timed, step)}
    for name, in_memory in (("from files", False), ("from memory", True)):
        data = gp.datasets.voc.Segmentation(folder, "train", gp.datasets.scenes.CLASSES, in_memory=in_memory)
        batches = gp.datasets.segmentation.batches(data, options.batch_size)
        passes = itertools.chain.from_iterable(itertools.repeat(batches))
        sides[name] = functools.partial(timed, passes.__next__)
    seconds = take_turns(sides, options.rounds, options.warmup)
    for name in ("from files", "from memory"):
        names = {name: f"reading {name}", "step": f"a step of {len(devices)} devices"}
        results.add(title(options), seconds, name, ["step"], names=names)


PARTS = {"norm": compare_norms, "devices": compare_devices, "reading": share_of_reading}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="cpu:2", help="several of them (default: cpu:2)")
    parser.add_argument("--size", type=int, default=128, help="pixels per side (default: 128)")
    parser.add_argument("--batch_size", type=int, default=16, help="images per step (default: 16)")
    parser.add_argument("--rounds", type=int, default=20, help="how often each contestant runs (default: 20)")
    parser.add_argument("--warmup", type=int, default=150, help="rounds before them (default: 150)")
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    parser.add_argument("--data_root", help="folder of the data sets' files")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    rows.add_options(parser)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.size, options.batch_size)
    devices = gp.devices(options.devices)
    results = rows.Rows(options)
    for name, part in PARTS.items():
        if options.only in (None, name):
            part(devices, options, results)


if __name__ == "__main__":
    main()
