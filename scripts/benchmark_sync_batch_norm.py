"""How much SyncBatchNorm costs: against plain BatchNorm and MXNet's contrib layer, and where the time goes.

    python scripts/benchmark_sync_batch_norm.py                  # all of it, a few minutes
    python scripts/benchmark_sync_batch_norm.py --rounds 5 --no-contrib

Every ratio comes from one run in which the contestants take turns, so that whatever else the machine does falls on all
of them; the median over the rounds is printed. The net is GluonCV's cifar_resnet20_v1 with a batch of 128 on two
devices, hybridized; the single layer takes 64 x 64 x 32 x 32.
"""

import argparse
import statistics
import time

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


def resnet(norm_layer, norm_kwargs, devices, batch=128):
    """A function that trains cifar_resnet20_v1 by one step on the devices."""
    from gluoncv.model_zoo import get_model

    net = get_model("cifar_resnet20_v1", norm_layer=norm_layer, norm_kwargs=norm_kwargs)
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize()
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
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


def take_turns(steps, rounds, warmup):
    """{name: seconds of each round}, the contestants in turn in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + warmup):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def report(title, seconds, plain="BatchNorm"):
    """Print medians, and ratios to plain BatchNorm within each round."""
    print(f"\n{title}")
    for name, values in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(values, seconds[plain]))
        print(f"  {name:<24}{statistics.median(values) * 1e3:8.1f} ms   {ratio:5.2f} x {plain}")


def where_time_goes(step, layers, rounds):
    """Print what the layers' callbacks spend on kernels, waiting and exchange in one step; the rest is Python.

    The seconds are summed over the devices, which work at the same time.
    """
    groups = [layer.sync_group for layer in layers]
    with gp.nn.measured(groups) as spent:
        for _ in range(rounds):
            step()
    print(f"\nWhere SyncBatchNorm's time goes, ms per step, {len(layers)} layers, all devices together")
    for name, seconds in spent.items():
        print(f"  {name:<24}{seconds / rounds * 1e3:8.1f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="how often each contestant runs (default: 20)")
    parser.add_argument("--no-contrib", action="store_true", help="leave MXNet's slow contrib layer out")
    parser.add_argument("--warmup", type=int, default=60, help="rounds before them, while buffers grow (default: 60)")
    args = parser.parse_args()

    devices = gp.devices("cpu:2")
    plain, synced, contrib = gluon.nn.BatchNorm, gp.nn.SyncBatchNorm, gluon.contrib.nn.SyncBatchNorm

    layers = {"BatchNorm": one_layer(plain, devices[0])[0], "SyncBatchNorm": one_layer(synced, devices[0])[0]}
    report("One layer, 64x64x32x32, forward and backward, one device", take_turns(layers, args.rounds, args.warmup))

    net_step, net = resnet(synced, None, devices)
    nets = {"BatchNorm": resnet(plain, None, devices)[0], "SyncBatchNorm": net_step}
    if not args.no_contrib:
        nets["contrib SyncBatchNorm"] = resnet(contrib, {"num_devices": len(devices)}, devices)[0]
    seconds = take_turns(nets, args.rounds, args.warmup)
    report("cifar_resnet20_v1, batch 128 on two devices, hybridized, one training step", seconds)
    if "contrib SyncBatchNorm" in seconds:
        factor = statistics.median(a / b for a, b in zip(seconds["contrib SyncBatchNorm"], seconds["SyncBatchNorm"]))
        print(f"  SyncBatchNorm is {factor:.1f} x faster than contrib SyncBatchNorm")

    found = []
    net.apply(lambda block: found.append(block) if isinstance(block, synced) else None)
    where_time_goes(net_step, found, args.rounds)


if __name__ == "__main__":
    main()
