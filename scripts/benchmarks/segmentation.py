"""Measure what a training step of segmentation costs: two devices against one, SyncBatchNorm, and reading images.

    python scripts/benchmarks/segmentation.py                        the small FCN, 16 images of 128 x 128
    python scripts/benchmarks/segmentation.py --size 64 --quick
    python scripts/benchmarks/segmentation.py --parts norm

Each contestant trains in a process of its own, from its first step on, and they take turns step by step. Printed are
medians of steps 3 to 12 and of steps 100 to 150. Reading is to read, decode and normalise a batch.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
import rounds
import rows

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

NUM_CLASSES = 11
NORMS = {"BatchNorm": gluon.nn.BatchNorm, "SyncBatchNorm": gp.nn.SyncBatchNorm}
READING = {"reading from files": False, "reading from memory": True}  # task -> whether images stay decoded in memory
PARTS = ("devices", "norm", "reading")


def worker(options):
    """One process: whole training steps, hybridized, each waited for, and what reads a batch."""
    net = gp.models.SmallFCN(NUM_CLASSES, aux=True, norm_layer=NORMS[options.norm])
    net.initialize(mx.init.Xavier(magnitude=2), ctx=gp.devices(options.devices))
    net.hybridize()
    loss = gp.models.PixelLoss(aux_weight=0.4)
    loss.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-4})
    parallel_step = gp.DataParallel(net, loss, trainer).step
    random, size, num = np.random.default_rng(0), options.size, options.batch_size
    images = random.standard_normal((num, 3, size, size)).astype("float32")
    masks = random.integers(0, NUM_CLASSES, (num, size, size)).astype("int32")

    def step(repeats):
        for _ in range(repeats):
            parallel_step(images, masks)
            mx.nd.waitall()

    tasks = {"step": step}
    if "reading" in options.parts:
        folder = gp.datasets.scenes.write(options.data_root, num_train=64, num_test=1, size=size)
        for task, in_memory in READING.items():
            data = gp.datasets.voc.Segmentation(folder, "train", gp.datasets.scenes.CLASSES, in_memory=in_memory)
            batches = gp.datasets.segmentation.batches(data, num)
            passes = itertools.chain.from_iterable(itertools.repeat(batches))

            def read(repeats, passes=passes):
                for _ in range(repeats):
                    next(passes)

            tasks[task] = read
    rounds.serve(0, tasks)


def compare(part, options, results):
    """Rows of one part, early and late."""
    several, title = options.devices, f"small FCN, {options.batch_size} images of {options.size} x {options.size}"
    me = [sys.executable, str(Path(__file__).resolve()), "--size", str(options.size), "--worker", "--parts", part]
    me += ["--batch_size", str(options.batch_size)]
    me += ["--data_root", options.data_root] if options.data_root else []
    sides = {several: (several, "SyncBatchNorm")}  # name -> devices and batch norm
    measured, others = [several], None
    if part == "devices":
        sides["one device"] = "cpu:1" if several.startswith("cpu") else "gpu:1", "SyncBatchNorm"
    elif part == "norm":
        sides, measured = {norm: (several, norm) for norm in NORMS}, ["SyncBatchNorm"]
        title += f", {several}"
    else:
        measured, others = list(READING), [several]
    with rounds.started(
        (name, rounds.Group(name, [([*me, "--devices", spec, "--norm", norm], {})], 1))
        for name, (spec, norm) in sides.items()
    ) as groups:
        tasks = {name: (group, "step") for name, group in groups.items()}
        if part == "reading":
            tasks |= {task: (groups[several], task) for task in READING}
        for when, taken in rounds.early_and_late(tasks, None, options.quick):
            for name in measured:
                results.add(title, taken, name, others, names={several: f"a step of {several}"}, when=when)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="cpu:2", help="several of them (cpu:2)")
    parser.add_argument("--size", type=int, default=128, help="pixels per side (128)")
    parser.add_argument("--batch_size", type=int, default=16, help="images per step (16)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured (everything)")
    parser.add_argument("--data_root", help="folder of the data sets' files")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--norm", choices=NORMS, help=argparse.SUPPRESS)
    options = rows.parse(parser, worker)
    results = rows.Rows(options)
    for part in options.parts:
        compare(part, options, results)


if __name__ == "__main__":
    main()
