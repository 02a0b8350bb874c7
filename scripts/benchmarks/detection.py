"""Measure what a training step of Faster R-CNN costs on several devices, and what reading its data costs.

    python scripts/benchmarks/detection.py                     two CPU devices against one with all cores
    python scripts/benchmarks/detection.py --devices gpu:4     several GPUs against the first of them

Both sides run in processes of their own, since the engine's settings are made once per process; they take turns, and
the medians are compared. A step is that of configs/faster_rcnn/default.yaml: the small net on scenes of digits, with
SyncBatchNorm. Reading is everything before the step: images, boxes, targets of the anchors, padding.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time

import rows

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd


def serve(spec, batch_size, data_root):
    """Time reading and step of one batch for each line on standard input (the process of one side)."""
    devices, rcnn = gp.devices(spec), gp.models.faster_rcnn
    folder = gp.datasets.scenes.write(data_root, num_train=128, num_test=8)
    dataset = gp.datasets.voc.Detection(folder, "train", gp.datasets.scenes.CLASSES, in_memory=True)
    gp.reseed(0)
    net = rcnn.small(dataset.classes)
    net.initialize(mx.init.Xavier(), ctx=devices)
    training = rcnn.Training(net)
    training.hybridize()
    targets = rcnn.Targets(net, 16, gp.datasets.pictures.as_input, 64, pos_iou=0.5, neg_iou=0.3)
    loader = gp.datasets.samples.SampleBatches(
        dataset, targets.collate, batch_size, targets.mark(lambda image, label, random: (image, label)), shuffle=True,
        seed=0, last_batch="discard",
    )  # fmt: skip
    trainer = gluon.Trainer(net.collect_train_params(), "sgd", {"learning_rate": 0.001, "momentum": 0.9})
    step = gp.DataParallel(training, rcnn.Loss(), trainer)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def once():
        start = time.perf_counter()
        batch = next(batches)
        read = time.perf_counter()
        step(batch[:4], batch[4:])
        nd.waitall()
        return read - start, time.perf_counter() - read

    for _ in range(8):
        once()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(once()), flush=True)


class Side:
    """A process that times one batch whenever asked."""

    def __init__(self, options, spec, **environment):
        words = ["--serve", spec, "--batch_size", str(options.batch_size)]
        words += ["--data_root", options.data_root] if options.data_root else []
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), *words], env={**os.environ, **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdin and self.process.stdout
        self.input, self.output = self.process.stdin, self.process.stdout
        if not any(line.startswith("ready") for line in self.output):
            raise SystemExit(f"the benchmark's process ended with exit code {self.process.wait(60)}")

    def time(self):
        self.input.write("step\n")
        self.input.flush()
        return json.loads(self.output.readline())

    def close(self):
        self.input.close()
        self.process.wait(60)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:2", help="the contestant with several devices (cpu:2)")
    parser.add_argument("--batch_size", type=int, default=16, help="images per step (16)")
    parser.add_argument("--repeats", type=int, default=21, help="steps of each contestant (21)")
    parser.add_argument("--data_root", help="folder of the data sets' files")
    rows.add_options(parser)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.batch_size, options.data_root)
    kind = "gpu:1" if options.devices.startswith("gpu") else "cpu"
    cores = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))} if kind == "cpu" else {}
    sides = {"one device": Side(options, kind, **cores), options.devices: Side(options, options.devices)}
    times: dict[str, list] = {name: [] for name in sides}
    try:
        for _ in range(options.repeats):
            for name, side in sides.items():
                times[name].append(side.time())
    finally:
        for side in sides.values():
            side.close()
    results = rows.Rows(options)
    part = f"small Faster R-CNN, {options.batch_size} images per step"
    whole = {name: [sum(pair) for pair in pairs] for name, pairs in times.items()}
    results.add(f"{part}, with reading", whole, options.devices)
    read = [one for one, _ in times[options.devices]]
    taken = {"reading": read, f"a step of {options.devices} with reading": whole[options.devices]}
    results.add(part, taken, "reading")
    return 0


if __name__ == "__main__":
    sys.exit(main())
