"""Measure how processes exchange: the store mpi against MXNet's dist_sync (and Horovod, where it is installed).

    python scripts/benchmark_kvstore.py                     two processes on this machine, every store that is there
    python scripts/benchmark_kvstore.py --rounds 5 --parts small large lenet

All stores live in the same two processes and take turns, round by round, so that what else the machine does meets all
of them alike; the ratios of the medians are what counts. dist_sync has one server besides, as MXNet would start it.
"alone" is the same step of one process without a store, so the difference is what the exchange costs.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import gluon_parallel as gp
import mxnet as mx

SIZES = (256, 16 * 1024, 1 << 20, 10 * 1000 * 1000, 100 * 1000 * 1000)  # bytes
PIECES = 160  # of 100 MB of gradients


def median_of_rounds(functions, rounds):
    """Seconds per call of each function: the median over rounds in which all take turns."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, (function, repeats) in functions.items():
            began = time.perf_counter()
            for _ in range(repeats):
                function()
            mx.nd.waitall()
            taken[name].append((time.perf_counter() - began) / repeats)
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}  # the first round warms up


def tell(stores, title, seconds, reference):
    """Print one line of medians, and how many times the reference's they are."""
    if next(iter(stores.values())).rank == 0:
        whole = seconds[reference]
        parts = [f"{name} {value * 1e6:10.0f} us ({value / whole:5.2f} x)" for name, value in seconds.items()]
        print(f"{title:34}" + "  ".join(parts), flush=True)


def pushpull(store, key, array):
    """One exchange, waited for."""
    store.pushpull(key, array)
    array.wait_to_read()


def small(stores, rounds):
    """One message of each size; what a SyncBatchNorm layer with 64 channels sends, as the layer sends it."""
    layers = {}
    for name, store in stores.items():
        layers[name] = gp.exchange.Exchange(store, "layer")
        layers[name].prepare(129)
    calls = {name: iter(range(1 << 30)) for name in stores}
    vector = np.ones(129)
    functions = {name: (lambda name=name: layers[name].gather(next(calls[name]), vector), 100) for name in stores}
    tell(stores, "one SyncBatchNorm message", median_of_rounds(functions, rounds), "mpi")
    for number, size in enumerate(SIZES):
        arrays = {name: mx.nd.zeros(size // 4) for name in stores}
        for name, store in stores.items():
            store.broadcast(100 + number, arrays[name], [arrays[name]])
        repeats = max(1, min(100, 10_000_000 // size))
        functions = {
            name: (functools.partial(pushpull, store, 100 + number, arrays[name]), repeats)
            for name, store in stores.items()
        }
        tell(stores, f"pushpull of {size} bytes", median_of_rounds(functions, rounds), "mpi")


def large(stores, rounds):
    """100 MB of gradients in pieces, all under way at once."""
    pieces = {name: [mx.nd.zeros(SIZES[-1] // 4 // PIECES) for _ in range(PIECES)] for name in stores}
    for name, store in stores.items():
        for key, piece in enumerate(pieces[name]):
            store.broadcast(200 + key, piece, [piece])

    def all_pieces(name):
        for key, piece in enumerate(pieces[name]):
            stores[name].pushpull(200 + key, piece, priority=-key)

    functions = {name: (lambda name=name: all_pieces(name), 1) for name in stores}
    tell(stores, f"100 MB in {PIECES} pieces", median_of_rounds(functions, rounds), "mpi")


def build(model, devices, store, dtype="float32"):
    """A training step of one model: a function without arguments, and its number of images."""
    if model == "lenet":
        net, shape, num = gp.models.LeNet(), (1, 28, 28), 128
    else:
        from gluoncv.model_zoo import get_model

        net, shape, num = get_model("cifar_resnet20_v1", classes=10), (3, 32, 32), 64
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize(static_alloc=True)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=store or "device",
                               update_on_kvstore=False)  # fmt: skip
    step = gp.DataParallel(net, mx.gluon.loss.SoftmaxCrossEntropyLoss(), trainer, devices)
    num = num * len(devices)
    x, y = mx.nd.random.uniform(shape=(num, *shape)), mx.nd.arange(num) % 10
    step(x, y).wait_to_read()
    return lambda: step(x, y)


def train(model, stores, rounds):
    """A step on 1 device x 2 processes over each store, and the same without a store."""
    functions = {"alone": (build(model, [mx.cpu(0)], None), 3)}
    functions.update({name: (build(model, [mx.cpu(0)], store), 3) for name, store in stores.items()})
    tell(stores, f"step of {model}, 1 x 2", median_of_rounds(functions, rounds), "mpi")


def lenet(stores, rounds):
    """LeNet, 128 images per process."""
    train("lenet", stores, rounds)


def resnet20(stores, rounds):
    """GluonCV's ResNet-20 for CIFAR, 64 images per process."""
    train("cifar_resnet20_v1", stores, rounds)


PARTS = {"small": small, "large": large, "lenet": lenet, "resnet20": resnet20}


def worker(options):
    """One of the two processes."""
    gp.devices("cpu:2")
    stores = {name: gp.kvstore.create(name) for name in options.stores}
    for part in options.parts:
        PARTS[part](stores, options.rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--stores", nargs="+", default=["mpi", "dist_sync"])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return 0
    return max(group(options, part) for part in options.parts)


def group(options, part):
    """Start the two processes (and a server) for one part: a store's keys keep their shapes, so parts share none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    allowed = {f"{name}_ALLOW_RUN_AS_ROOT{more}": "1" for name in ("OMPI", "PRTE") for more in ("", "_CONFIRM")}
    environment = {
        **os.environ, **allowed, "OMP_NUM_THREADS": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port), "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1",
    }  # fmt: skip
    serve = [sys.executable, "-c", "import gluon_parallel"]
    roles = ("scheduler", "server") if "dist_sync" in options.stores else ()
    servers = [subprocess.Popen(serve, env={**environment, "DMLC_ROLE": role}) for role in roles]
    beside = str(Path(sys.executable).parent)
    mpirun = shutil.which("mpirun", path=os.pathsep.join([beside, os.environ.get("PATH", "")])) or "mpirun"
    command = [mpirun, "--oversubscribe", "--bind-to", "none", "-n", "2", sys.executable, sys.argv[0], "--worker"]
    command += ["--parts", part, "--rounds", str(options.rounds), "--stores", *options.stores]
    try:
        return subprocess.run(command, env={**environment, "DMLC_ROLE": "worker"}).returncode
    finally:
        for server in servers:
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


if __name__ == "__main__":
    sys.exit(main())
