"""Measure what data parallelism costs and gains on this machine, as ratios.

    python scripts/benchmark_data_parallel.py                     two CPU devices against one with all cores
    python scripts/benchmark_data_parallel.py --devices gpu:4     several GPUs against the first of them
    python scripts/benchmark_data_parallel.py --only allreduce --megabytes 400

Both sides of a ratio alternate within one run and the median of the repeats is compared, since machines are noisy.
The one-device side runs in a process of its own, because the engine's settings for several devices (the number of
threads per device) are made once per process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

MODELS = {"lenet": (256, (1, 28, 28)), "resnet20": (128, (3, 32, 32))}


def make_net(name):
    if name == "lenet":
        return gp.models.LeNet(num_classes=10)
    from gluoncv.model_zoo import get_model

    return get_model("cifar_resnet20_v1")


def make_step(name, devices):
    """A function that runs one whole training step, hybridized, and waits for it."""
    batch_size, shape = MODELS[name]
    net = make_net(name)
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9})
    parallel = gp.DataParallel(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer)
    random = np.random.RandomState(0)
    images = random.standard_normal((batch_size, *shape)).astype("float32")
    labels = random.randint(0, 10, batch_size).astype("float32")

    def step():
        parallel.step(images, labels)
        nd.waitall()

    return step


def serve(name, spec):
    """Time one step for each line on standard input (the process of one side of a ratio)."""
    step = make_step(name, gp.devices(spec))
    for _ in range(5):
        step()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(timed(step), flush=True)


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class Side:
    """A process that times one step whenever asked."""

    def __init__(self, name, spec, **environment):
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--serve", name, spec],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin and self.process.stdout
        self.input, self.output = self.process.stdin, self.process.stdout
        self.read_until("ready")

    def read_until(self, word):
        if not any(line.startswith(word) for line in self.output):
            raise SystemExit(f"the benchmark's process ended with exit code {self.process.wait(60)}")

    def time(self):
        self.input.write("step\n")
        self.input.flush()
        return float(self.output.readline())

    def close(self):
        self.input.close()
        self.process.wait(60)


def alternate(sides, repeats):
    """Median seconds per side; the sides take turns."""
    seconds: dict = {name: [] for name in sides}
    for _ in range(repeats):
        for name, function in sides.items():
            seconds[name].append(function())
    return {name: statistics.median(times) for name, times in seconds.items()}


def benchmark_training(name, spec, repeats):
    """Images per second of `spec` over those of one device with all cores (and of MXNet's settings as they come)."""
    several = gp.devices(spec)
    one = str(several[0]).split("(")[0]
    cores = str(len(os.sched_getaffinity(0)))
    sides = {
        "one device, all cores": Side(name, one, OMP_NUM_THREADS=cores) if one == "cpu" else Side(name, "gpu:1"),
        f"{len(several)} devices": Side(name, spec),
    }
    if one == "cpu":
        sides[f"{len(several)} devices, MXNet's defaults"] = Side(name, spec, MXNET_CPU_TEMP_COPY="4")
    try:
        seconds = alternate({key: side.time for key, side in sides.items()}, repeats)
    finally:
        for side in sides.values():
            side.close()
    batch_size, base = MODELS[name][0], seconds["one device, all cores"]
    for key, value in seconds.items():
        print(f"{name:9} batch {batch_size}  {key:28} {batch_size / value:8.0f} images/s   ratio {base / value:.2f}")
    return {key: base / value for key, value in seconds.items()}


def benchmark_allreduce(spec, megabytes, repeats):
    """Time of `gp.allreduce` over that of NumPy's add-and-copy (CPU) and of MXNet's `device` store."""
    devices = gp.devices(spec)
    size = int(megabytes * 1e6 / 4)
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

    def run(function):
        for array in [*arrays, *host]:
            array[:] = 1
        nd.waitall()
        return timed(function)

    functions = {"gp.allreduce": ours, "NumPy add and copy": numpy, "kvstore device": theirs}
    run(ours)
    seconds = alternate({key: lambda f=function: run(f) for key, function in functions.items()}, repeats)
    for key, value in seconds.items():
        print(
            f"allreduce {len(devices)} x {megabytes:g} MB  {key:20} {1e3 * value:8.1f} ms   "
            f"{value / seconds['gp.allreduce']:.2f} x gp.allreduce"
        )
    return {key: value / seconds["gp.allreduce"] for key, value in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:2")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--only", choices=[*MODELS, "allreduce"])
    parser.add_argument("--json", help="write the ratios to this file")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(*options.serve)
    ratios = {}
    for name in MODELS:
        if options.only in (None, name):
            ratios[name] = benchmark_training(name, options.devices, options.repeats)
    if options.only in (None, "allreduce"):
        ratios["allreduce"] = benchmark_allreduce(options.devices, options.megabytes, options.repeats)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(ratios, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
