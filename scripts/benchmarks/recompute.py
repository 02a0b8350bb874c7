"""Measure memory and time of training steps with and without recomputation, and with MXNet's own mirroring.

    python scripts/benchmarks/recompute.py --net resnet50
    python scripts/benchmarks/recompute.py --net lstm

Each way runs in a process of its own, and they take turns step by step, from the third one on. The memory is the
largest resident memory of the process in all steps, less what it has before them. The formula is what recomputation
has to keep while a part goes backward, for the part where that is most: the inputs of the parts up to it, the memory
in which it trains by itself (with the gradient of its input), what the layers in front of all keep for their backward
pass, and the temporary buffers, which MXNet keeps and which grow during the first steps.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import limits
import rounds
import rows

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

NAMES = {"plain": "as it is", "mirror": "MXNet's mirroring", "recompute": "`gp.nn.recompute`"}
FORMULA = "the least, by the formula"


def make(options):
    """(net, its parts that can be recomputed, the layers in front of them, one batch of inputs)."""
    if options.net == "resnet50":
        net = gluon.model_zoo.vision.resnet50_v1(classes=10)
        parts, front = [unit for stage in net.features[4:8] for unit in stage], net.features[:4]
        inputs = nd.random.uniform(shape=(options.batch_size, 3, options.image_size, options.image_size))
    else:
        net, front = gluon.nn.HybridSequential(), None
        net.add(*(gluon.rnn.LSTM(options.hidden_size, input_size=options.hidden_size) for _ in range(options.layers)))
        parts = list(net)
        net.add(gluon.nn.Dense(10, flatten=False, in_units=options.hidden_size))
        inputs = nd.random.uniform(shape=(options.length, options.batch_size, options.hidden_size))
    net.initialize(mx.init.Xavier())
    return net, parts, front, inputs


def resident():
    """Bytes of this process's resident memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settled():
    """Bytes of resident memory when nothing runs: MXNet frees arrays in a thread of its own."""
    nd.waitall()
    time.sleep(0.3)
    return resident()


def peak(step):
    """Bytes of the largest resident memory during a step."""
    most, ended = [0], threading.Event()

    def watch():
        while not ended.wait(0.002):
            most[0] = max(most[0], resident())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        step()
        nd.waitall()
    finally:
        ended.set()
        watching.join()
    return most[0]


def train(net, inputs):
    """A step of the whole net."""
    with mx.autograd.record():
        loss = (net(inputs) ** 2).mean()
    loss.backward()


def train_part(part, inputs):
    """A step of a part of a net. Its output's gradient is in the plain layout, as a recomputed part returns it."""
    with mx.autograd.record():
        output = part(inputs)
    output.backward(nd.ones_like(output))


def formula(parts, seen, front, inputs):
    """Bytes by the formula, for hybridized parts and their inputs `seen`."""
    start = settled()
    os.environ["MXNET_CPU_TEMP_COPY"] = "1"  # gp.nn.recompute's thread has one buffer
    launching = concurrent.futures.ThreadPoolExecutor(1)
    launching.submit(nd.random.uniform, shape=1).result()  # the thread's first use of MXNet's resources reads it
    del os.environ["MXNET_CPU_TEMP_COPY"]

    def alone(part, array):
        array = array.detach()
        mx.autograd.mark_variables([array], [nd.empty(array.shape)])  # whose memory is taken when it is written
        before = launching.submit(settled).result()
        return launching.submit(peak, lambda: train_part(part, array)).result() - before

    inputs_kept = list(itertools.accumulate(4 * array.size for array in seen))
    for part, array in zip(parts, seen):
        alone(part, array)  # buffers become as large as they have to be
    front_keeps = 0
    if front is not None:
        for number in range(12):
            for _ in range(number % 4):
                nd.ones(8).sum()  # takes the next one of four buffers, so that each comes to serve every operator
            train_part(front, inputs)
    buffers = settled() - start
    if front is not None:
        with mx.autograd.record():
            output = front(inputs)
        front_keeps = settled() - start - buffers - 4 * output.size
        output.backward()
    most = max(kept + alone(part, array) for kept, part, array in zip(inputs_kept, parts, seen))
    print(f"formula: {buffers / 1e6:.0f} MB of buffers, {front_keeps / 1e6:.0f} in front, {most / 1e6:.0f} of parts")
    return buffers + front_keeps + most


def work(options):
    """Measure one way in this process."""
    net, parts, front, inputs = make(options)
    seen = []
    for part in parts:
        part.register_forward_pre_hook(lambda part, arguments: seen.append(arguments[0]))
    predicting = concurrent.futures.ThreadPoolExecutor(1)  # whose temporary buffers stay, and are not those of steps
    predicting.submit(net, inputs).result()
    for part in parts:
        part._forward_pre_hooks.clear()
    if options.way == "recompute":
        for part in parts:
            gp.nn.recompute(part)
    net.hybridize()
    predicting.submit(net, inputs).result().wait_to_read()
    if options.way == FORMULA:
        Path(options.told, FORMULA).write_text(json.dumps(formula(parts, seen, front, inputs)))
        return
    seen.clear()
    before, most = settled(), [0]

    def steps(times):
        for _ in range(times):
            most[0] = max(most[0], peak(lambda: train(net, inputs)))

    tell = Path(options.told, options.way).write_text
    rounds.serve(0, {"step": steps, "memory": lambda _: tell(json.dumps(most[0] - before))})


def main(options):
    if options.way:
        work(options)
        return
    part = f"a step of {options.net}, {options.batch_size} samples"
    results, ways = rows.Rows(options), ["recompute", *options.others]
    with tempfile.TemporaryDirectory() as folder:

        def command(way):
            # Freed arrays go back to the system at once.
            variables = {"MXNET_BACKWARD_DO_MIRROR": str(int(way == "mirror")), "MALLOC_MMAP_THRESHOLD_": "65536"}
            return [sys.executable, __file__, *sys.argv[1:], "--way", way, "--told", folder], variables

        with rounds.started((way, rounds.Group(way, [command(way)], 1)) for way in ways) as groups:
            taken = rounds.take_turns(groups, "step", 1, options.steps, warm_up=2)
            for group in groups.values():
                group.run("memory", 1)
        words, variables = command(FORMULA)
        subprocess.run(words, env={**os.environ, **variables}, check=True, timeout=600)
        memory = {way: [json.loads(Path(folder, way).read_text())] for way in (*ways, FORMULA)}
    arithmetic = None
    if options.net == "resnet50":
        net, shape = gluon.model_zoo.vision.resnet50_v1(classes=10), (3, options.image_size, options.image_size)
        arithmetic = {"flop": options.batch_size * limits.flop(net, shape)}
    results.add(f"memory of {part}", memory, "recompute", options.others, names=NAMES, unit="MB")
    results.add(f"memory of {part}", memory, FORMULA, [], unit="MB")
    when = f"steps 3 to {2 + options.steps}"
    results.add(part, taken, "recompute", options.others, names=NAMES, when=when, work=arithmetic)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=("resnet50", "lstm"), default="resnet50", help="what is trained")
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a step")
    parser.add_argument("--image-size", type=int, default=128, help="pixels of each side, for resnet50")
    parser.add_argument("--hidden-size", type=int, default=512, help="numbers in the state, for lstm")
    parser.add_argument("--layers", type=int, default=8, help="LSTMs upon each other, for lstm")
    parser.add_argument("--length", type=int, default=100, help="steps in time, for lstm")
    parser.add_argument("--steps", type=int, default=10, help="training steps that are measured")
    others = ("plain", "mirror")
    parser.add_argument("--others", nargs="*", choices=others, default=others, help="what it is compared with")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--told", help=argparse.SUPPRESS)
    rows.add_options(parser)
    main(parser.parse_args())
