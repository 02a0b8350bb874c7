"""Measure memory and time of training steps with and without recomputation, and with MXNet's own mirroring.

    python scripts/benchmarks/recompute.py --net resnet50 --batch-size 16 --image-size 128
    python scripts/benchmarks/recompute.py --net lstm --batch-size 64

Each way runs in a process of its own. The memory is the largest resident memory of the process in steps, less what it
has before them: activations, gradients and workspaces. The formula counts what a step has to keep: the outputs of all
layers for the backward pass; with recomputation the inputs of the marked blocks, what is outside of them, and the
outputs of the layers of the largest one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

WAYS = ("plain", "mirror", "recompute")


def make(options, marks):
    """(net, one batch of inputs); with `marks` its parts are recomputed."""
    if options.net == "resnet50":
        net = gluon.model_zoo.vision.resnet50_v1(classes=10)
        parts = [unit for stage in net.features[4:8] for unit in stage]
        inputs = nd.random.uniform(shape=(options.batch_size, 3, options.image_size, options.image_size))
    else:
        net = gluon.nn.HybridSequential()
        net.add(*(gluon.rnn.LSTM(options.hidden_size, input_size=options.hidden_size) for _ in range(options.layers)))
        parts = list(net)
        net.add(gluon.nn.Dense(10, flatten=False, in_units=options.hidden_size))
        inputs = nd.random.uniform(shape=(options.length, options.batch_size, options.hidden_size))
    net.initialize(mx.init.Xavier())
    if marks:
        for part in parts:
            gp.nn.recompute(part)
    net.hybridize()
    return net, inputs


def resident():
    """Bytes of this process's resident memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def work(options):
    """Measure one way in this process."""
    net, inputs = make(options, options.way == "recompute")
    with mx.autograd.predict_mode():
        net(inputs[:1] if options.net == "resnet50" else inputs[:, :1]).wait_to_read()
    for parameter in net.collect_params().values():
        parameter.data().wait_to_read()
    before, most, ended = resident(), [0], threading.Event()

    def watch():
        while not ended.wait(0.002):
            most[0] = max(most[0], resident())

    threading.Thread(target=watch, daemon=True).start()
    seconds = []
    for _step in range(options.steps):
        began = time.perf_counter()
        with mx.autograd.record():
            loss = (net(inputs) ** 2).mean()
        loss.backward()
        mx.nd.waitall()
        seconds.append(time.perf_counter() - began)
    ended.set()
    print(json.dumps({"bytes": most[0] - before, "seconds": statistics.median(seconds[1:])}))


def main(options):
    if options.way:
        work(options)
        return
    for way in WAYS:
        variables = {**os.environ, "MXNET_BACKWARD_DO_MIRROR": str(int(way == "mirror"))}
        variables["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed arrays go back to the system at once
        words = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        output = subprocess.run(words, env=variables, check=True, stdout=subprocess.PIPE).stdout
        result = json.loads(output.splitlines()[-1])
        print(f"{options.net}, {way}: {result['bytes'] / 1e6:.0f} MB, {result['seconds']:.3f} s per step", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=("resnet50", "lstm"), default="resnet50")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    main(parser.parse_args())
