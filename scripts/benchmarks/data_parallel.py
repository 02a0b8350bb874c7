"""Measure what data parallelism costs and gains on this machine, as ratios.

    python scripts/benchmarks/data_parallel.py                     two CPU devices against one with all cores
    python scripts/benchmarks/data_parallel.py --devices gpu:4     several GPUs against the first of them
    python scripts/benchmarks/data_parallel.py --parts lenet --torch-python /path/to/python-with-torch
    python scripts/benchmarks/data_parallel.py --parts allreduce --megabytes 400

Each contestant trains in a process of its own, from its first step on, and they take turns step by step, so that what
else the machine does affects all alike. Printed are medians of steps 3 to 12 and of steps 100 to 150, and how much
memory each process has taken at most. PyTorch's DistributedDataParallel has two processes of one thread over gloo, with
the same layers. GluonCV's DataParallelModel and DataParallelCriterion have the same net and devices. In
resnet20_original MXNet's nets are trained with ``convert_for_cpu=False``.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import kvstore
import limits
import numpy as np
import rounds
import rows

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

NAMES = {
    "one": "one device", "several": "several devices", "sync": "several devices, SyncBatchNorm",
    "ddp": "PyTorch DDP (gloo), two processes", "gluoncv": "GluonCV's DataParallelModel",
}  # fmt: skip
# name -> (shape of an image, images per step)
NETS = {"lenet": ((1, 28, 28), 256), "resnet20": ((3, 32, 32), 128), "resnet20_original": ((3, 32, 32), 128)}


def make_net(name, kind):
    if name == "lenet":
        return gp.models.LeNet(num_classes=10)
    from gluoncv.model_zoo import get_model

    return get_model("cifar_resnet20_v1", norm_layer=gp.nn.SyncBatchNorm if kind == "sync" else gluon.nn.BatchNorm)


def gluoncv_step(net, loss, trainer, devices):
    """A step as GluonCV's scripts make it."""
    from gluoncv.utils.parallel import DataParallelCriterion, DataParallelModel

    model, criterion = DataParallelModel(net, devices), DataParallelCriterion(loss, devices)

    def step(images, labels):
        with mx.autograd.record():
            losses = criterion(model(nd.array(images)), nd.array(labels))
        mx.autograd.backward(losses)
        trainer.step(len(images))

    return step


def worker(name, kind, spec):
    """One process: whole training steps, hybridized, each waited for."""
    devices = gp.devices(spec)
    shape, num = NETS[name]
    net = make_net(name, kind)
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize(static_alloc=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    loss, converts = gluon.loss.SoftmaxCrossEntropyLoss(), name != "resnet20_original"
    if kind == "gluoncv":
        parallel_step = gluoncv_step(net, loss, trainer, devices)
    else:
        parallel_step = gp.DataParallel(net, loss, trainer, convert_for_cpu=converts).step
    random = np.random.RandomState(0)
    images = random.standard_normal((num, *shape)).astype("float32")
    labels = random.randint(0, 10, num).astype("float32")

    def step(repeats):
        for _ in range(repeats):
            parallel_step(images, labels)
            nd.waitall()

    rounds.serve(0, {"step": step})


def start(name, kind, options):
    """The process, or the two of "ddp", that train the net of that name."""
    if kind == "ddp":
        return rounds.Group(kind, rounds.data_parallel_torch(options.torch_python, name), 2)
    spec = options.devices
    if kind == "one":
        spec = "cpu:1" if spec.startswith("cpu") else "gpu:1"
    argv = [sys.executable, str(Path(__file__).resolve()), "--worker", name, kind, spec]
    return rounds.Group(kind, [(argv, {})], 1)


def benchmark_training(name, options, results):
    """A step of every contestant against one of the other devices, early and late, and the memory of all."""
    kinds = ["one", "several"]
    kinds += ["sync"] * name.startswith("resnet") + ["ddp"] * bool(options.torch_python) + ["gluoncv"] * options.gluoncv
    shape, num = NETS[name]
    part = f"{kvstore.TITLES[name]}, {num} images per step, {options.devices}"
    work = {"flop": num * limits.flop(make_net(name, "one"), shape)}
    pairs = [("several", ["one", *kinds[3 if "sync" in kinds else 2 :]])] + [("sync", ["several"])] * ("sync" in kinds)
    with rounds.started((kind, start(name, kind, options)) for kind in kinds) as groups:
        for when, taken in rounds.early_and_late(groups, "step", options.quick):
            for measured, others in pairs:
                results.add(part, taken, measured, others, names=NAMES, when=when, work=work)
        memory = {kind: [1e9 * group.peak_memory()] for kind, group in groups.items()}
        for measured, others in pairs:
            results.add(f"{part}: most memory", memory, measured, others, names=NAMES, unit="MB")


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def benchmark_allreduce(options, results):
    """Time of `gp.allreduce`, of NumPy's add-and-copy (CPU) and of MXNet's `device` store."""
    devices = gp.devices(options.devices)
    size = int(options.megabytes * 1e6 / 4)
    arrays = [nd.ones(size, ctx=device) for device in devices]
    host = [np.ones(size, "float32") for _ in devices]
    store = mx.kv.create("device")
    store.init(0, arrays[0])

    def ours():
        gp.allreduce(arrays)
        nd.waitall()

    def theirs():
        store.pushpull(0, arrays, out=arrays)
        nd.waitall()

    def numpy():
        for other in host[1:]:
            np.add(host[0], other, out=host[0])
        for other in host[1:]:
            np.copyto(other, host[0])

    functions = {"`gp.allreduce`": ours, "NumPy's add and copy": numpy, "store `device`": theirs}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    periods = rounds.periods(options.quick)
    for _ in range(max(steps.stop for steps in periods.values())):
        for name, function in functions.items():
            for array in [*arrays, *host]:
                array[:] = 1
            nd.waitall()
            seconds[name].append(timed(function))
    part = f"sum of {len(devices)} x {options.megabytes:g} MB, {options.devices}"
    work = {"bytes": limits.traffic(4 * size, len(devices))}
    for when, steps in periods.items():
        taken = {name: turns[steps] for name, turns in seconds.items()}
        results.add(part, taken, "`gp.allreduce`", when=when, work=work)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:2", help="the contestant with several devices (cpu:2)")
    parts = [*NETS, "allreduce"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="what is measured (everything)")
    parser.add_argument("--torch-python", help="a Python with PyTorch, for DistributedDataParallel")
    parser.add_argument("--gluoncv", action="store_true", help="measure GluonCV's DataParallelModel too")
    parser.add_argument("--megabytes", type=float, default=100, help="of each array of allreduce (100)")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = rows.parse(parser, lambda options: worker(*options.worker))
    results = rows.Rows(options)
    for name in NETS:
        if name in options.parts:
            benchmark_training(name, options, results)
    if "allreduce" in options.parts:
        benchmark_allreduce(options, results)


if __name__ == "__main__":
    main()
