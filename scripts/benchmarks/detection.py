"""Measure what a training step of Faster R-CNN costs on several devices, and what reading its data costs.

    python scripts/benchmarks/detection.py                     two CPU devices against one with all cores
    python scripts/benchmarks/detection.py --devices gpu:4     several GPUs against the first of them

Each side trains in a process of its own, from its first step on, and they take turns step by step. Printed are medians
of steps 3 to 12 and of steps 100 to 150. A step is that of configs/faster_rcnn/default.yaml: the small net on scenes of
digits, with SyncBatchNorm. Reading is everything before the step: images, boxes, targets of the anchors, padding.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import rounds
import rows

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd


def worker(options):
    """One process: reading a batch, and reading and a training step."""
    devices, rcnn = gp.devices(options.devices), gp.models.faster_rcnn
    folder = gp.datasets.scenes.write(options.data_root, num_train=128, num_test=8)
    dataset = gp.datasets.voc.Detection(folder, "train", gp.datasets.scenes.CLASSES, in_memory=True)
    gp.reseed(0)
    net = rcnn.small(dataset.classes)
    net.initialize(mx.init.Xavier(), ctx=devices)
    training = rcnn.Training(net)
    training.hybridize()
    targets = rcnn.Targets(net, 16, gp.datasets.pictures.as_input, 64, pos_iou=0.5, neg_iou=0.3)
    loader = gp.datasets.samples.SampleBatches(
        dataset, targets.collate, options.batch_size, targets.mark(lambda image, label, random: (image, label)),
        shuffle=True, seed=0, last_batch="discard",
    )  # fmt: skip
    trainer = gluon.Trainer(net.collect_train_params(), "sgd", {"learning_rate": 0.001, "momentum": 0.9})
    step = gp.DataParallel(training, rcnn.Loss(), trainer)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def read(repeats):
        for _ in range(repeats):
            next(batches)

    def read_and_step(repeats):
        for _ in range(repeats):
            batch = next(batches)
            step(batch[:4], batch[4:])
            nd.waitall()

    rounds.serve(0, {"read": read, "read and step": read_and_step})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:2", help="the contestant with several devices (cpu:2)")
    parser.add_argument("--batch_size", type=int, default=16, help="images per step (16)")
    parser.add_argument("--data_root", help="folder of the data sets' files")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = rows.parse(parser, worker)
    several, one = options.devices, "gpu:1" if options.devices.startswith("gpu") else "cpu:1"
    me = [sys.executable, str(Path(__file__).resolve()), "--worker", "--batch_size", str(options.batch_size)]
    me += ["--data_root", options.data_root] if options.data_root else []
    results = rows.Rows(options)
    names = {"one": "one device", "several": several, "step": f"a step of {several} with reading"}
    part = f"small Faster R-CNN, {options.batch_size} images per step"
    sides = (("one", one), ("several", several))
    with rounds.started(
        (name, rounds.Group(name, [([*me, "--devices", spec], {})], 1)) for name, spec in sides
    ) as both:
        tasks = {name: (group, "read and step") for name, group in both.items()}
        tasks["reading"] = both["several"], "read"
        for when, taken in rounds.early_and_late(tasks, None, options.quick):
            results.add(f"{part}, with reading", taken, "several", ["one"], names=names, when=when)
            taken["step"] = taken["several"]
            results.add(part, taken, "reading", ["step"], names=names, when=when)


if __name__ == "__main__":
    main()
