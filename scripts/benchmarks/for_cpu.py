"""Measure training steps of one process: a net as it comes, after ``gp.nn.convert_for_cpu``, and in PyTorch.

    python scripts/benchmarks/for_cpu.py --torch-python /path/to/python-with-torch
    python scripts/benchmarks/for_cpu.py --nets mobilenetv2_1.0 mobilenet0.75

Each has a process of its own with the same number of threads. They take turns, step by step, so that what else the
machine does affects all alike; the ratios of the steps count. PyTorch takes part in the nets that
for_cpu_torch.py defines. Names are those of ``gluon.model_zoo``; a prefix "gluoncv:" takes GluonCV's.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import limits
import rounds
import rows

import gluon_parallel as gp
import mxnet as mx

NETS = ("mobilenetv2_1.0", "resnet18_v1", "resnet50_v1", "vgg11_bn", "densenet121")
IN_TORCH = NETS
SHAPES = {"densenet121": (4, 224)}  # its last pooling takes 7 x 7 pixels
SHAPE = (16, 96)  # images, pixels along each side


def network(name):
    """The net of that name, for 1000 classes."""
    if name.startswith("gluoncv:"):
        from gluoncv.model_zoo import get_model

        return get_model(name.partition(":")[2])
    return mx.gluon.model_zoo.vision.get_model(name)


def worker(name, converted):
    """One process: training steps of one net."""
    net, (num, size) = network(name), SHAPES.get(name, SHAPE)
    if converted:
        gp.nn.convert_for_cpu(net)
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    x, y = mx.nd.random.uniform(shape=(num, 3, size, size)), mx.nd.arange(num)

    def steps(repeats):
        for _ in range(repeats):
            with mx.autograd.record():
                value = loss(net(x), y)
            value.backward()
            trainer.step(num)
            mx.nd.waitall()

    rounds.serve(0, {"step": steps})


def start(kind, name, options):
    """The process that runs the net of that name: "plain", "converted" or "torch"."""
    env = {"OMP_NUM_THREADS": str(options.threads)}
    if kind == "torch":
        script = str(Path(__file__).resolve().with_name("for_cpu_torch.py"))
        argv = [options.torch_python, script, name, *map(str, SHAPES.get(name, SHAPE))]
    else:
        argv = [sys.executable, str(Path(__file__).resolve()), "--worker", kind, "--nets", name]
    return rounds.Group(kind, [(argv, env)], 1)


def compare(name, options, results):
    """Early and late steps of the converted net and of the others."""
    kinds = ["plain", "converted", *(["torch"] if options.torch_python and name in IN_TORCH else [])]
    num, size = SHAPES.get(name, SHAPE)
    part = f"`{name}`, {num} images of {size} x {size}, {options.threads} threads"
    work = {"flop": num * limits.flop(network(name), (3, size, size))}
    names = {"plain": "as it comes", "torch": "PyTorch"}
    with rounds.started((kind, start(kind, name, options)) for kind in kinds) as groups:
        for when, taken in rounds.early_and_late(groups, "step", options.quick):
            results.add(part, taken, "converted", names=names, when=when, work=work)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=list(NETS), help=f"what is trained ({' '.join(NETS)})")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each process (all cores)")
    parser.add_argument("--torch-python", help="a Python with PyTorch, which then takes part")
    parser.add_argument("--worker", choices=["plain", "converted"], help=argparse.SUPPRESS)
    options = rows.parse(parser, lambda options: worker(options.nets[0], options.worker == "converted"))
    results = rows.Rows(options)
    for name in options.nets:
        compare(name, options, results)


if __name__ == "__main__":
    main()
