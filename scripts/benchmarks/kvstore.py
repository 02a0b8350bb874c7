"""Measure how processes exchange: the store mpi against MXNet's dist_sync, Horovod and PyTorch, on two processes.

    python scripts/benchmarks/kvstore.py                     mpi and dist_sync
    python scripts/benchmarks/kvstore.py --parts small large lenet
    python scripts/benchmarks/kvstore.py --parts lenet --torch-python PYTHON --horovod-python .venv-horovod/bin/python

Every engine has two processes of its own. The groups take turns, so that what else the machine does meets all of them
alike; the ratios within the turns are what counts, and the processor time tells what a busy machine does not change. A
step of the small sums is ten of them, one after the other, and what it takes is divided by ten. dist_sync has one
server besides, as MXNet would start it. In resnet20_original MXNet's nets are trained with ``convert_for_cpu=False``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import warnings
from pathlib import Path

import limits
import numpy as np
import rounds
import rows

import gluon_parallel as gp
import mxnet as mx

SIZES = {"256 B": 64, "16 KB": 4096, "1 MB": 1 << 18, "10 MB": 2_500_000}  # values
PIECES, VALUES = 160, 25_000_000  # 100 MB of gradients
SUMS = {"message": 10, "256 B": 10, "16 KB": 10}  # of a step; of the other tasks one
STEPS = {"10 MB": 1, "pieces": 1}  # in a turn; of the other tasks five
TITLES = {
    "lenet": "LeNet", "resnet20": "`cifar_resnet20_v1`",
    "resnet20_original": "`cifar_resnet20_v1`, `convert_for_cpu=False`",
    "dense6": "6 dense layers of 1024 (25 MB)", "dense24": "24 dense layers of 1024 (101 MB)",
}  # fmt: skip
NAMES = {
    "mpi": "store `mpi`", "dist_sync": "MXNet's `dist_sync`", "horovod": "Horovod (gloo)",
    "ddp": "PyTorch DDP (gloo)", "one": "one process, all cores", "devices": "one process, two devices",
}  # fmt: skip
VARIANTS = {
    "overlapped": "exchange during the backward pass", "late": "exchange after it", "without": "no exchange",
}  # fmt: skip


# ------------------------------------------------------------------ in a process of a group


def message(store):
    """What a SyncBatchNorm layer with 64 channels sends, as the layer sends it."""
    layer, calls, vector = gp.kvstore.exchange.StatisticsExchange(store, "layer"), iter(range(1 << 40)), np.ones(129)
    layer.prepare(len(vector))

    def repeat(times):
        for _ in range(times):
            layer.combine(next(calls), vector, 1)

    return repeat


def pushpull(store, keys, size):
    """Exchanges of so many values at each key, waited for together."""
    arrays = [mx.nd.zeros(size) for _ in keys]
    for key, array in zip(keys, arrays):
        store.broadcast(key, array, [array])

    def repeat(times):
        for _ in range(times):
            for key, array in zip(keys, arrays):
                store.pushpull(key, array, priority=-key)
            for array in arrays:
                array.wait_to_read()

    return repeat


def network(name):
    """(net, shape of an image, images per process)."""
    if name == "lenet":
        return gp.models.LeNet(), (1, 28, 28), 128
    if name.startswith("dense"):
        net = mx.gluon.nn.HybridSequential()
        net.add(*(mx.gluon.nn.Dense(1024, in_units=1024, activation="relu") for _ in range(int(name[5:]))))
        return net, (1024,), 64
    from gluoncv.model_zoo import get_model

    return get_model("cifar_resnet20_v1", classes=10), (3, 32, 32), 64


def work(name, processes=2):
    """What a step of so many processes computes, for a row."""
    net, shape, num = network(name)
    return {"flop": processes * num * limits.flop(net, shape)}


def training(name, store, devices, num_shares):
    """Steps of `num_shares` times as many images as one of two processes has, and variants of their exchange."""
    net, shape, num = network(name)
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize(static_alloc=True)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=store or "device",
                               update_on_kvstore=False)  # fmt: skip
    loss, converts = mx.gluon.loss.SoftmaxCrossEntropyLoss(), name != "resnet20_original"
    step = gp.DataParallel(net, loss, trainer, devices, convert_for_cpu=converts)
    x = mx.nd.random.uniform(shape=(num * num_shares, *shape))
    y = mx.nd.arange(num * num_shares) % 10
    exchange = trainer.allreduce_grads

    def repeat(times):
        trainer.allreduce_grads = exchange
        for _ in range(times):
            step(x, y)
        mx.nd.waitall()

    def late(times):  # the exchange begins when the backward pass is over
        trainer.allreduce_grads = lambda: (mx.nd.waitall(), exchange())
        for _ in range(times):
            step(x, y)
            mx.nd.waitall()

    def without(times):
        trainer.allreduce_grads = mx.nd.waitall
        for _ in range(times):
            step(x, y)
            mx.nd.waitall()

    def each(times):
        trainer.allreduce_grads = exchange
        for _ in range(times):
            step(x, y)
            mx.nd.waitall()

    return {"step": repeat, "late": late, "without": without, "overlapped": each}


def worker(options):
    """One process of a group."""
    for category in (gp.errors.SeparateTraining, gp.errors.StatisticsPerDevice):  # all take the same images, on purpose
        warnings.simplefilter("ignore", category)
    gp.devices("cpu:2" if options.worker == "devices" else "cpu:1")  # sets the engine up for so many
    store = gp.kvstore.create(options.worker) if options.worker not in ("one", "devices") else None
    tasks = {}
    if options.parts == ["exchanges"]:
        tasks["message"] = message(store)
        for number, (name, size) in enumerate(SIZES.items()):
            tasks[name] = pushpull(store, [100 + number], size)
        tasks["pieces"] = pushpull(store, range(200, 200 + PIECES), VALUES // PIECES)
        for name, num in SUMS.items():
            tasks[name] = lambda steps, repeat=tasks[name], num=num: repeat(num * steps)
    else:
        devices = [mx.cpu(0), mx.cpu(1)] if options.worker == "devices" else [mx.cpu(0)]
        tasks.update(training(options.parts[0], store, devices, 1 if store is not None else 2))
    rounds.serve(0 if store is None else store.rank, tasks)


# ------------------------------------------------------------------ who starts and asks them


def start(name, part, options, environment=None):
    """The group that is called `name`: a store, ``one`` process with all cores, or one with two ``devices``; or ddp."""
    cores = len(os.sched_getaffinity(0))
    # Not resolved: the link to the interpreter is what tells an environment.
    python = Path(options.horovod_python if name == "horovod" else sys.executable).absolute()
    me = [str(python), str(Path(__file__).resolve()), "--worker", name, "--parts", part]
    env = {"OMP_NUM_THREADS": str(cores if name == "one" else max(1, cores // 2)), **(environment or {})}
    if name in ("one", "devices"):
        return rounds.Group(name, [(me, env)], 1)
    if name == "mpi":
        return rounds.Group(name, [([*rounds.mpirun(2), *me], {**env, **rounds.AS_ROOT})], 2)
    if name == "horovod":
        run = [str(python), "-m", "gluon_parallel", "run", str(python.with_name("horovodrun"))]
        run += "--gloo -np 2 -H localhost:2".split()
        return rounds.Group(name, [([*run, "--network-interfaces", "lo", *me], env)], 2)
    if name == "ddp":
        return rounds.Group(name, rounds.data_parallel_torch(options.torch_python, part), 2)
    meet = {
        "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_NODE_HOST": "127.0.0.1", "DMLC_PS_ROOT_PORT": rounds.free_port(),
        "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", **env,
    }  # fmt: skip
    serve = [sys.executable, "-c", "import gluon_parallel"]
    roles = [(me, "worker"), (me, "worker"), (serve, "scheduler"), (serve, "server")]
    return rounds.Group(name, [(argv, {**meet, "DMLC_ROLE": role}) for argv, role in roles], 2)


def exchanges(options, results, tasks):
    """One message or array, and 100 MB of gradients in pieces that are all under way at once."""
    sizes = {**SIZES, "pieces": VALUES}
    with rounds.started((name, start(name, "exchanges", options)) for name in options.stores) as groups:
        for task in tasks:
            title = {"message": "one SyncBatchNorm message", "pieces": f"100 MB of gradients in {PIECES} pieces"}
            part = f"{title.get(task, f'`pushpull` of {task}')}, two processes"
            least = {"bytes": limits.traffic(4 * sizes[task], 2)} if task in sizes else None
            for when, steps in rounds.early_and_late(groups, task, options.quick, STEPS.get(task, 5)):
                taken = {name: [of_one_sum(turn, task) for turn in turns] for name, turns in steps.items()}
                results.add(part, taken, "mpi", names=NAMES, when=when, unit="us", work=least)


def of_one_sum(turn, task):
    """What a turn took, for each of the sums of a step."""
    num = SUMS.get(task, 1)
    return turn._replace(seconds=turn.seconds / num, processor=turn.processor / num)


def steps(options, results, net):
    """A training step over two processes, and of one process with the same images."""
    part, arithmetic = f"{TITLES[net]}, {2 * network(net)[2]} images per step", work(net)
    names = ["one", "devices", *options.stores, *(["ddp"] if options.torch_python else [])]
    with rounds.started((name, start(name, net, options)) for name in names) as groups:
        for when, taken in rounds.early_and_late(groups, "step", options.quick):
            results.add(part, taken, "mpi", names=NAMES, when=when, work=arithmetic)


def overlap(options, results, nets):
    """How much of the exchange the backward pass hides."""
    for net in nets:
        arithmetic = work(net)
        with rounds.started([("mpi", start("mpi", net, options))]) as groups:
            variants = {kind: (groups["mpi"], kind) for kind in VARIANTS}
            for when, taken in rounds.early_and_late(variants, "", options.quick):
                results.add(
                    f"{TITLES[net]}, two processes", taken, "overlapped", names=VARIANTS, when=when, work=arithmetic
                )
                during, late, alone = (statistics.median(turn.seconds for turn in taken[kind]) for kind in VARIANTS)
                hidden = float(np.clip(1 - (during - alone) / (late - alone), 0, 1)) if late > alone else float("nan")
                print(f"    hidden behind the backward pass: {hidden:.0%} of {max(0.0, late - alone) * 1e6:.0f} us")


PARTS = ("small", "large", "lenet", "resnet20", "resnet20_original", "overlap")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), help=f"some of {', '.join(PARTS)}")
    there = ["mpi", "dist_sync"]
    parser.add_argument("--stores", nargs="+", default=there, help=f"which take part ({' '.join(there)})")
    parser.add_argument(
        "--horovod-python", help="a Python with Horovod, as scripts/make_horovod.sh makes one; the store takes part"
    )
    parser.add_argument("--torch-python", help="a Python with PyTorch, for DistributedDataParallel over gloo")
    nets = "nets of the part overlap (lenet dense6)"
    parser.add_argument("--overlap-nets", nargs="+", choices=list(TITLES), default=["lenet", "dense6"], help=nets)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = rows.parse(parser, worker)
    if set(options.parts) - set(PARTS):
        parser.error(f"--parts: expected some of {', '.join(PARTS)}")
    options.stores += ["horovod"] if options.horovod_python else []
    results = rows.Rows(options)
    tasks = ["message", *SIZES] if "small" in options.parts else []
    tasks += ["pieces"] if "large" in options.parts else []
    if tasks:
        exchanges(options, results, tasks)
    for net in ("lenet", "resnet20", "resnet20_original"):
        if net in options.parts:
            steps(options, results, net)
    if "overlap" in options.parts:
        overlap(options, results, options.overlap_nets)


if __name__ == "__main__":
    main()
