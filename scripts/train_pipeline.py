"""Train a net with a large classifier as a pipeline: its stages are on a device each.

    python scripts/train_pipeline.py                                two stages on two GPUs or CPU devices; the digits
    python scripts/train_pipeline.py --num_micro_batches 8 --order gpipe --recompute
    python scripts/train_pipeline.py --devices cpu:4                two replicas of two stages
    python scripts/train_pipeline.py --devices gpu:4 --stages 4 --balance bytes --hidden_size 16384
    python scripts/train_pipeline.py --resume                       continue the newest run, bit for bit
    gluon-parallel launch -n 2 --devices cpu:2 scripts/train_pipeline.py  two processes of two stages, the same numbers

It prints where the net is cut and, at the end, what the passes of one step took; schedule.png shows them. Every run
gets a folder of its own, runs/<task>/<config>/<number>.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Optional

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd
from mxnet.gluon import nn

DEFAULT = Path(__file__).resolve().parent.parent / "configs" / "pipeline" / "default.yaml"
option = gp.config.option


@dataclasses.dataclass(frozen=True)
class Config(gp.config.MixedPrecisionConfig):
    stages: gp.config.PositiveInt = option("devices over which the net is cut; the others train further replicas")
    balance: str = option("what the stages shall have equally much of: time (measured before training) or bytes")
    num_micro_batches: gp.config.PositiveInt = option("parts of a replica's batch, one behind the other in the stages")
    order: str = option("of the passes: 1f1b (forward and backward in turn) or gpipe (all forward passes first)")
    recompute: bool = option("compute activations again for the backward pass: more work, less memory")
    accumulate: gp.config.PositiveInt = option("steps whose gradients are added up for one update")
    clip_global_norm: Optional[gp.config.PositiveFloat] = option("gradients are scaled down to this norm")
    hidden_size: gp.config.PositiveInt = option("units of each of the classifier's two hidden layers")
    momentum: gp.config.NonNegativeFloat = option("how much of the last step goes into the next one")
    weight_decay: gp.config.NonNegativeFloat = option("how strongly large weights are pulled towards 0")


def make_net(num_classes, hidden_size):
    """Few convolutions and a large classifier, which has nearly all parameters, as AlexNet and VGG have."""
    net = nn.HybridSequential()
    with net.name_scope():
        for channels in (16, 32):
            net.add(nn.Conv2D(channels, kernel_size=3, padding=1, activation="relu"))
            net.add(nn.MaxPool2D(pool_size=2, strides=2))
        for _ in range(2):
            net.add(nn.Dense(hidden_size, activation="relu"))
        net.add(nn.Dense(num_classes))
    return net


def check(config, devices, num_workers):
    """Refuse numbers that do not fit together."""
    if len(devices) % config.stages:
        raise gp.errors.ConfigError(
            f"--stages {config.stages}: {len(devices)} devices ({devices}) are no multiple of that; choose --devices, "
            f"such as cpu:{config.stages}, or another number of stages"
        )
    num = num_workers * len(devices) // config.stages * config.num_micro_batches
    if config.batch_size % num:
        raise gp.errors.ConfigError(
            f"--batch_size {config.batch_size} is no multiple of {num}: processes x replicas x micro-batches"
        )
    for name, allowed in (("balance", ("time", "bytes")), ("order", ("1f1b", "gpipe"))):
        if getattr(config, name) not in allowed:
            raise gp.errors.ConfigError(f"--{name} is {getattr(config, name)!r}, wanted {' or '.join(allowed)}")


def main(config: Config, run: gp.Run) -> None:
    devices, store = gp.devices(config.devices), gp.kvstore.create(config.kvstore)  # where we run
    check(config, devices, store.num_workers)
    replicas = [devices[first : first + config.stages] for first in range(0, len(devices), config.stages)]

    data = gp.datasets.load(config.dataset, root=config.data_root)
    train = gp.datasets.batches(*data.train, config.batch_size, True, config.seed, last_batch="discard")
    test = gp.datasets.batches(*data.test, batch_size=256)

    net = make_net(data.num_classes, config.hidden_size)
    net.initialize(mx.init.Xavier(), ctx=devices[0])
    net.hybridize()
    size = config.batch_size // store.num_workers // len(replicas) // config.num_micro_batches
    micro_batch = nd.array(data.train.images[:size], ctx=devices[0])
    net(micro_batch)  # from here on the shapes of all parameters are known
    stages = gp.pipeline.partition(net, config.stages, *([micro_batch] if config.balance == "time" else []))
    pipe = gp.Pipeline(
        stages, replicas, config.num_micro_batches, config.order, config.recompute,
        accumulate=config.accumulate, clip_global_norm=config.clip_global_norm,
    )  # fmt: skip
    optimizer = {"learning_rate": config.lr, "momentum": config.momentum, "wd": config.weight_decay}
    trainer = gluon.Trainer(pipe.collect_params(), "sgd", optimizer, kvstore=store)
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    schedule = mx.lr_scheduler.CosineScheduler(config.epochs, config.lr)  # so that the last epochs settle

    loop = gp.Loop(train, test, net=pipe.net, trainer=trainer, store=store, seed=config.seed, run=run,
                   accumulate=config.accumulate)  # fmt: skip
    train, test = loop.loaders
    loop.print(f"{run.folder}: a pipeline on {config.dataset}, running on: {loop} x {devices}\n{stages}")
    for epoch in loop.epochs(config.epochs, config.patience):
        trainer.set_learning_rate(schedule(epoch))
        for images, labels in train:
            loop.add(pipe.step(loss_function, trainer, images, labels), pipe.num_samples)
        pipe.update()  # with what the last steps have added up
        [(_, accuracy)] = gp.evaluate(pipe, test, "acc", devices[:1], store)
        loop.end_epoch(score=accuracy, test_accuracy=accuracy)

    # One more step, after the last checkpoint, which therefore changes nothing that is kept.
    profile = pipe.profile(loss_function, trainer, *next(iter(train)))
    loop.print(profile)
    if loop.is_main:
        profile.draw(run.folder / "schedule.png")
        loop.print(f"schedule:   {run.folder / 'schedule.png'}")


if __name__ == "__main__":
    sys.exit(gp.start(main, Config, DEFAULT, description=__doc__))
