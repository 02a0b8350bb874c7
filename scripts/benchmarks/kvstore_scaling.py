"""Measure how the store mpi's cost grows with the number of processes, beside MPI's own operations and PyTorch's gloo.

    python scripts/benchmarks/kvstore_scaling.py             1, 2, 8 and 24 processes, with and without shared memory
    python scripts/benchmarks/kvstore_scaling.py --processes 64 --transports tcp --rounds 5
    python scripts/benchmarks/kvstore_scaling.py --torch-python /path/to/python-with-torch

``tcp`` leaves shared memory out, as between hosts. The groups take turns at the same arrays: repetitions 3 to 12, and
100 to 150, five in a turn. Processor time per process is what a busy machine changes least; with fewer cores than
processes, the seconds say little. MPI's operations are its nonblocking ones on NumPy arrays, with sleep between
tests; statistics are exchanged one after the other, as layers do, arrays all at once.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import limits
import numpy as np
import rounds
import rows

ARRAYS = {"60 x 2 KB": (60, 512), "10 x 400 KB": (10, 100_000)}  # how many, of so many float32 each
ONE_BY_ONE = {f"{name}, one by one": form for name, form in ARRAYS.items()}
SUMS = {**ARRAYS, **ONE_BY_ONE}
STATISTICS, NUMBERS = "10 statistics of 129", 129  # float64
TASKS = (*SUMS, STATISTICS)
LENET, IMAGES = "LeNet step, 8 images each", 8
READY = "ready"  # nothing, after the start
WAITING, LATE = "waiting", 0.5  # seconds for which all wait for the first process
FACTS = "facts"  # about each process, told when it has done all else
TRANSPORTS = ("tcp", "shared memory")
REPEATS = 5  # of a task in one turn
NAMES = {"ours": "store `mpi`", "mpi": "MPI's own operations", "gloo": "PyTorch's gloo"}
_FACTS = "BENCHMARK_FACTS"  # the folder in which each process tells of itself


# ------------------------------------------------------------------ in a process of a group


def ours():
    """(rank, tasks) of the store mpi."""
    import gluon_parallel as gp
    import mxnet as mx

    warnings.simplefilter("ignore", gp.errors.SeparateTraining)  # all take the same images, on purpose
    gp.devices("cpu:1")
    began = time.perf_counter()
    store = gp.kvstore.create("mpi")
    opened = time.perf_counter() - began
    tasks: dict[str, Callable] = {READY: lambda _: None}
    keys, calls = iter(range(1 << 20)), iter(range(1 << 40))
    for name, (num, size) in SUMS.items():
        arrays = {next(keys): mx.nd.zeros(size) for _ in range(num)}

        def sums(times, arrays=arrays, one_by_one=name in ONE_BY_ONE):
            for _ in range(times):
                if one_by_one:  # as in MXNet's documentation
                    for key, array in arrays.items():
                        store.pushpull(key, array, out=array, priority=-key)
                else:  # as `Trainer.step` does
                    store.pushpull(list(arrays), list(arrays.values()))
                mx.nd.waitall()

        tasks[name] = sums
    combine = statistics_of(store)

    def gathers(times):
        for _ in range(10 * times):
            combine(next(calls))

    tasks[STATISTICS] = gathers

    def waits(times):
        for _ in range(times):
            if store.rank == 0:
                time.sleep(LATE)
            combine(next(calls))

    tasks[WAITING] = waits
    net = gp.models.LeNet()
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=store)
    step = gp.DataParallel(net, mx.gluon.loss.SoftmaxCrossEntropyLoss(), trainer)
    x, y = mx.nd.random.uniform(shape=(IMAGES, 1, 28, 28)), mx.nd.arange(IMAGES) % 10

    def steps(times):
        for _ in range(times):
            step(x, y)
        mx.nd.waitall()

    tasks[LENET] = steps
    tasks[FACTS] = lambda _: tell(store.rank, opened=opened)
    return store.rank, tasks


def statistics_of(store):
    """A function that combines statistics of all processes as a pass of SyncBatchNorm does, call after call."""
    import gluon_parallel as gp
    import mxnet as mx

    operator = gp.nn.sync_batch_norm.operator
    layer = gp.nn.SyncBatchNorm(in_channels=(NUMBERS - 1) // 2, kvstore=store)
    layer.initialize(ctx=mx.cpu(0))
    group = layer.sync_group
    group.prepare()
    operator.callbacks()
    settings, types = operator.Settings(group.token), (np.dtype(np.float32),) * 3
    state = operator.OperatorState.take(settings, group, mx.cpu(0), (8, layer.running_mean.shape[0]), types)
    message = np.ctypeslib.as_array((ctypes.c_double * NUMBERS).from_address(state.record.message))
    allreduce = gp.native.function("gp_allreduce", 2)

    def combine(call, layer=layer):  # which must live
        message[:] = 1
        if not allreduce(state.address, 2 * call):
            raise group.rendezvous.failure

    return combine


def mpi():
    """(rank, tasks) of MPI's own operations."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()

    def finish(requests):
        while not MPI.Request.Testall(requests):
            time.sleep(50e-6)

    tasks: dict[str, Callable] = {READY: lambda _: None}
    for name, (num, size) in SUMS.items():
        arrays = [np.zeros(size, np.float32) for _ in range(num)]

        def sums(times, arrays=arrays):
            for _ in range(times):
                finish([comm.Iallreduce(MPI.IN_PLACE, array) for array in arrays])

        tasks[name] = sums
    vector, rows = np.ones(NUMBERS), np.empty((comm.size, NUMBERS))

    def gathers(times):
        for _ in range(10 * times):
            finish([comm.Iallgather(vector, rows)])

    tasks[STATISTICS] = gathers
    return comm.rank, tasks


def gloo():
    """(rank, tasks) of PyTorch over gloo: the arrays of a task as one bucket."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    tasks: dict[str, Callable] = {READY: lambda _: None}
    for name, (num, size) in SUMS.items():
        bucket = torch.zeros(num * size)

        def sums(times, bucket=bucket):
            for _ in range(times):
                distributed.all_reduce(bucket)

        tasks[name] = sums
    vector = torch.ones(NUMBERS, dtype=torch.float64)
    rows = [torch.empty_like(vector) for _ in range(distributed.get_world_size())]

    def gathers(times):
        for _ in range(10 * times):
            distributed.all_gather(rows, vector)

    tasks[STATISTICS] = gathers
    return distributed.get_rank(), tasks


def tell(rank, **facts):
    """Leave facts about this process where the benchmark reads them, with its memory in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    memory = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
    Path(os.environ[_FACTS], f"{rank}.json").write_text(json.dumps({**facts, **memory}))


# ------------------------------------------------------------------ who starts and asks them


def start(engine, num, transport, options, folder):
    """A group of `num` processes."""
    script = [str(Path(__file__).resolve()), "--worker", engine]
    env = {"OMP_NUM_THREADS": "1", _FACTS: folder}
    if engine == "gloo":
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": rounds.free_port(), "WORLD_SIZE": str(num), **env}
        meet["GLOO_SOCKET_IFNAME"] = "lo"
        return rounds.Group(
            engine, [([options.torch_python, *script], {**meet, "RANK": str(rank)}) for rank in range(num)], num
        )
    env |= {"OMPI_MCA_btl": "tcp,self" if transport == "tcp" else "^tcp", "GLUON_PARALLEL_TIMEOUT": "600"}
    env |= rounds.AS_ROOT
    if transport == "tcp":
        env["GLUON_PARALLEL_SHARED_MEMORY"] = "0"
    return rounds.Group(engine, [([*rounds.mpirun(num), sys.executable, *script], env)], num, limit=1200.0)


def medians(taken):
    """name -> (milliseconds of processor time per process, milliseconds)."""
    return {
        name: (
            statistics.median(1e3 * turn.processor / turn.processes for turn in turns),
            statistics.median(1e3 * turn.seconds for turn in turns),
        )
        for name, turns in taken.items()
    }


def measure(num, transport, options, results, arithmetic):
    """One number of processes over one transport: a row and a line per task; LeNet needs `arithmetic` per image."""
    engines = ["ours"]
    if num > 1:  # else nothing is exchanged
        engines += ["mpi", *(["gloo"] if options.torch_python and transport == "tcp" else [])]
    with tempfile.TemporaryDirectory() as folder:
        began, measured = time.perf_counter(), {}
        where = f"{num} process{'es' * (num > 1)}, {transport}"
        with rounds.started() as groups:
            for engine in engines:
                groups[engine] = start(engine, num, transport, options, folder)
                groups[engine].run(READY, 1)
                if engine == "ours":
                    until_started = time.perf_counter() - began
            for task in filter(options.tasks.__contains__, TASKS):
                least = {"bytes": limits.traffic(4 * math.prod(SUMS[task]), num)} if task in SUMS else None
                for when, taken in rounds.early_and_late(groups, task, options.quick, REPEATS):
                    measured[task] = medians(taken)
                    results.add(f"{task}, {where}", taken, "ours", names=NAMES, when=when, work=least)
            alone = {"ours": groups["ours"]}
            least = {"flop": num * IMAGES * arithmetic}
            for when, steps in rounds.early_and_late(alone, LENET, options.quick) if LENET in options.tasks else ():
                measured[LENET] = medians(steps)
                results.add(f"{LENET}, {where}", steps, "ours", names=NAMES, when=when, work=least)
            waits = rounds.take_turns(alone, WAITING, 1, options.rounds, 1)["ours"]
            waiting = statistics.median(turn.processor for turn in waits) / (LATE * max(1, num - 1))
            groups["ours"].run(FACTS, 1)
        facts = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    results.add(f"start, {where}", {"ours": [until_started]}, "ours", names=NAMES, unit="s")
    results.add(
        f"memory of a process, {where}", {"ours": [fact["Pss"] for fact in facts]}, "ours", names=NAMES, unit="MB"
    )
    opened, share, resident = (statistics.median(fact[name] for fact in facts) for name in ("opened", "Pss", "Rss"))
    for task, taken in measured.items():
        shown = "   ".join(f"{name} {used:8.2f} / {wall:8.2f}" for name, (used, wall) in taken.items())
        ratio = f"   {taken['ours'][0] / taken['mpi'][0]:5.2f} x mpi" if "mpi" in taken else ""
        print(f"    {task:27} {shown}{ratio}")
    print(
        f"    start: {until_started:.1f} s, of which the store {opened:.1f} s; memory per process {share / 1e6:.0f} MB "
        f"(resident {resident / 1e6:.0f} MB); one that waits takes {waiting:.1%} of a core",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 8, 24], help="how many (1 2 8 24)")
    parser.add_argument(
        "--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS), help="of ours and MPI's"
    )
    parser.add_argument("--tasks", nargs="+", choices=(*TASKS, LENET), default=(*TASKS, LENET), help="which (all)")
    parser.add_argument("--rounds", type=int, default=7, help="turns in which all wait for the first process (7)")
    parser.add_argument("--torch-python", help="a Python with PyTorch, for gloo")
    parser.add_argument("--worker", choices=("ours", "mpi", "gloo"), help=argparse.SUPPRESS)
    rows.add_options(parser, has_late_steps=True)
    options = parser.parse_args()
    if options.worker:
        rounds.serve(*{"ours": ours, "mpi": mpi, "gloo": gloo}[options.worker]())
        return
    results = rows.Rows(options)
    import gluon_parallel as gp

    arithmetic = limits.flop(gp.models.LeNet(), (1, 28, 28))
    print("milliseconds of processor time per process / milliseconds, for each repetition")
    for num in options.processes:
        for transport in options.transports:
            measure(num, transport, options, results, arithmetic)


if __name__ == "__main__":
    main()
