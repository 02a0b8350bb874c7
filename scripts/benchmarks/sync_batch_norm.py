"""How much SyncBatchNorm costs: against plain BatchNorm and MXNet's contrib layer, and where the time goes.

    python scripts/benchmarks/sync_batch_norm.py                  # all of it, a few minutes
    python scripts/benchmarks/sync_batch_norm.py --only layer     # or small, resnet
    gluon-parallel launch -n 2 --devices cpu:1 scripts/benchmarks/sync_batch_norm.py --only processes

Every ratio comes from one run in which the contestants take turns step by step, so that what else the machine does
affects all alike; steps 3 to 12 and steps 100 to 150 are compared. The net is GluonCV's cifar_resnet20_v1
with a batch of 128 on two devices, hybridized, each kind of layer in a process of its own; the single layer takes
64 x 64 x 32 x 32. "Small" is 20 layers of 2 x 64 x 4 x 4 on two devices,
where the arithmetic itself is next to nothing: what is left is what a layer costs however little it has to do.
"Processes" is what one exchange of two processes takes.
"""

import argparse
import ctypes
import importlib
import statistics
import sys
import time
import warnings
from pathlib import Path

import kvstore
import rounds
import rows

import gluon_parallel as gp
import mxnet as mx
from mxnet import autograd, gluon


def one_layer(norm, device):
    """A function that runs one layer of 64x64x32x32 forward and backward on one device."""
    layer = norm(in_channels=64)
    layer.initialize(ctx=device)
    layer.hybridize(static_alloc=True, static_shape=True)
    x = mx.nd.random.normal(shape=(64, 64, 32, 32), ctx=device)
    head = mx.nd.random.normal(shape=x.shape, ctx=device)
    x.attach_grad()

    def step():
        with autograd.record():
            y = layer(x)
        y.backward(head)
        mx.nd.waitall()

    return step, layer


def small_layers(norm, devices, num_layers=20):
    """A function that runs that many layers of 2x64x4x4 forward and backward on the devices."""
    net = gluon.nn.HybridSequential()
    for _ in range(num_layers):
        net.add(norm(in_channels=64))
    net.initialize(ctx=devices)
    net.hybridize(static_alloc=True)
    xs = [mx.nd.random.normal(shape=(2, 64, 4, 4), ctx=device) for device in devices]
    heads = [mx.nd.random.normal(shape=x.shape, ctx=x.context) for x in xs]
    for x in xs:
        x.attach_grad()

    def step():
        with autograd.record():
            ys = gp.parallel_apply(net, [(x,) for x in xs])
        autograd.backward(ys, heads)
        mx.nd.waitall()

    return step, net


def processor_time(devices, quick, results):
    """The processor time of a layer, pass and device, and what of it its callbacks take."""
    contestants = {
        "BatchNorm": gluon.nn.BatchNorm,
        "SyncBatchNorm": gp.nn.SyncBatchNorm,
    }
    made = {name: small_layers(norm, devices) for name, norm in contestants.items()}
    spent: dict[str, list] = {name: [] for name in made}
    periods = rounds.periods(quick)
    for _ in range(max(steps.stop for steps in periods.values())):
        for name, (step, net) in made.items():
            groups = [layer.sync_group for layer in net if hasattr(layer, "sync_group")]
            began, began_processor = time.perf_counter(), time.process_time()
            with gp.nn.measured(groups) as callbacks:
                step()
            now = time.process_time() - began_processor, callbacks["processor"], time.perf_counter() - began
            spent[name].append(now)
    num = len(made["BatchNorm"][1]) * 2 * len(devices)
    for number, what in enumerate(("processor time", "processor time in callbacks", "time")):
        part = f"{what} per layer, pass and device: 20 layers of 2 x 64 x 4 x 4, {len(devices)} devices"
        for when, steps in periods.items():
            taken = {name: [turn[number] / num for turn in turns[steps]] for name, turns in spent.items()}
            for name in list(contestants)[1:]:
                results.add(part, taken, name, ["BatchNorm"] if number != 1 else [], when=when, unit="us")


def exchanges_of_processes(num_thousands, results, num_channels=64):
    """What one exchange of a layer with the other processes takes, called back to back from C."""
    import numpy as np

    store = gp.kvstore.create("mpi")
    net = gp.nn.SyncBatchNorm(in_channels=num_channels, kvstore=store)
    net.initialize(ctx=gp.devices("cpu:1"))
    x = mx.nd.random.normal(shape=(2, num_channels, 4, 4))
    for _ in range(2):  # the first exchange is agreed about by messages
        with autograd.train_mode():
            net(x).wait_to_read()
    group = net.sync_group
    native, records = (importlib.import_module(f"gluon_parallel.native{name}") for name in ("", ".records"))
    exchange = native.function("gp_allreduce", 2)

    message, seconds = np.ones(1 + 2 * num_channels), []
    state = records.C.State(layer=group.rendezvous.address, message=message.ctypes.data)
    first = group.rendezvous.calls
    for number in range(1000 * num_thousands):
        began = time.perf_counter()
        done = exchange(ctypes.addressof(state), 2 * (first + number))
        seconds.append(time.perf_counter() - began)
        assert done, "the other process was late"
    if store.rank == 0:
        thousands = [statistics.median(seconds[first : first + 1000]) for first in range(0, len(seconds), 1000)]
        part = f"one exchange of {num_channels} channels by {store.num_workers} processes, medians of 1,000"
        results.add(part, {"shared memory": thousands}, "shared memory", unit="us")


def resnet(kind, devices, batch=128):
    """A function that trains cifar_resnet20_v1 by one step on the devices."""
    from gluoncv.model_zoo import get_model

    norm_kwargs = {"num_devices": len(devices)} if kind == "contrib" else None
    net = get_model("cifar_resnet20_v1", norm_layer=NORMS[kind], norm_kwargs=norm_kwargs)
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize(static_alloc=True)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    warnings.filterwarnings("ignore", category=gp.errors.InexactUpdate)  # what is timed are the layers, without a sum
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=None)
    x = mx.nd.random.normal(shape=(batch, 3, 32, 32))
    y = mx.nd.array([i % 10 for i in range(batch)])
    xs, ys = gp.split_and_load(x, devices), gp.split_and_load(y, devices)

    def step():
        with autograd.record():
            losses = gp.parallel_apply(lambda x, y: loss(net(x), y), list(zip(xs, ys)))
        gp.parallel_apply(autograd.backward, losses)
        trainer.step(batch)
        mx.nd.waitall()

    return step, net


NORMS = {
    "BatchNorm": gluon.nn.BatchNorm,
    "SyncBatchNorm": gp.nn.SyncBatchNorm,
    "contrib": gluon.contrib.nn.SyncBatchNorm,
}


def compare_layers(devices, results):
    """The times of one layer."""
    steps = {kind: one_layer(NORMS[kind], devices[0])[0] for kind in ("BatchNorm", "SyncBatchNorm")}
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(150):
        for kind, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[kind].append(time.perf_counter() - began)
    part = "one layer, 64 x 64 x 32 x 32, forward and backward, one device"
    work = {"bytes": 5 * 4 * 64 * 64 * 32 * 32}  # forward reads and writes, backward reads two arrays and writes one
    for when, counted in rounds.periods().items():
        taken = {kind: values[counted] for kind, values in seconds.items()}
        results.add(part, taken, "SyncBatchNorm", when=when, work=work)


def compare_nets(kinds, options, results):
    """The times of a training step with each kind of layer, and the memory of each process."""
    part, names = f"`cifar_resnet20_v1`, 128 images, {options.devices}", {"contrib": "MXNet's contrib SyncBatchNorm"}
    command = [sys.executable, str(Path(__file__).resolve()), "--devices", options.devices, "--worker"]
    work = kvstore.work("resnet20")
    with rounds.started((kind, rounds.Group(kind, [([*command, kind], {})], 1)) for kind in kinds) as groups:
        for when, taken in rounds.early_and_late(groups, "step", options.quick):
            results.add(part, taken, "SyncBatchNorm", names=names, when=when, work=work)
        memory = {kind: [1e9 * group.peak_memory()] for kind, group in groups.items()}
        results.add(f"{part}: most memory", memory, "SyncBatchNorm", names=names, unit="MB")


def where_time_goes(devices, num_steps):
    """Print what the layers' callbacks spend on arithmetic, waiting and exchange in one step.

    The seconds are summed over the devices, which work at the same time.
    """
    step, net = resnet("SyncBatchNorm", devices)
    layers: list = []
    net.apply(lambda block: layers.append(block) if isinstance(block, gp.nn.SyncBatchNorm) else None)
    step()
    with gp.nn.measured([layer.sync_group for layer in layers]) as spent:
        for _ in range(num_steps):
            step()
    print(f"\nWhere SyncBatchNorm's time goes, ms per step, {len(layers)} layers, all devices together")
    for name, seconds in spent.items():
        print(f"  {name:<24}{seconds / num_steps * 1e3:8.1f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=20, help="of 1,000 exchanges, and of steps whose time is divided (20)"
    )
    parts = ["all", "small", "layer", "resnet", "processes"]
    parser.add_argument("--only", default="all", choices=parts, help="one part (all)")
    parser.add_argument("--devices", default="cpu:2", help="such as gpu:4 (cpu:2)")
    parser.add_argument("--no-contrib", action="store_true", help="leave MXNet's slow contrib layer out")
    parser.add_argument("--worker", choices=list(NORMS), help=argparse.SUPPRESS)
    rows.add_options(parser, has_late_steps=True)
    args = parser.parse_args()

    if args.only == "processes":
        return exchanges_of_processes(args.rounds, rows.Rows(args, "gluon-parallel launch -n 2 --devices cpu:1"))
    devices = gp.devices(args.devices)
    if args.worker:
        step, _ = resnet(args.worker, devices)
        return rounds.serve(0, {"step": lambda repeats: [step() for _ in range(repeats)]})
    results = rows.Rows(args)
    if args.only in ("all", "small"):
        processor_time(devices, args.quick, results)
    if args.only in ("all", "layer"):
        compare_layers(devices, results)
    if args.only in ("all", "resnet"):
        compare_nets([kind for kind in NORMS if kind != "contrib" or not args.no_contrib], args, results)
        where_time_goes(devices, args.rounds)
    return None


if __name__ == "__main__":
    main()
