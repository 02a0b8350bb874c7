"""Train LeNet on several devices with Gluon.

    python scripts/train_lenet.py                                   all GPUs, or two CPU devices; the embedded digits
    python scripts/train_lenet.py --dataset fashion_mnist --config configs/lenet/fashion_mnist.yaml
    python scripts/train_lenet.py --devices gpu:4 --batch_size 1024 --lr 0.4
    python scripts/train_lenet.py --resume                          continue the newest run, bit for bit
    gluon-parallel launch -n 2 --devices cpu:1 scripts/train_lenet.py     two processes, the same numbers

Every run gets a folder of its own, runs/<task>/<config>/<number>.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

DEFAULT = Path(__file__).resolve().parent.parent / "configs" / "lenet" / "default.yaml"


@dataclasses.dataclass(frozen=True)
class Config(gp.config.MixedPrecisionTraining):
    momentum: gp.config.NonNegativeFloat = gp.config.option("how much of the last step goes into the next one")
    weight_decay: gp.config.NonNegativeFloat = gp.config.option("how strongly large weights are pulled towards 0")


def main(config: Config, run: gp.runs.Run) -> None:
    devices, store = gp.devices(config.devices), run.store  # where we run
    run.tell(f"{run.folder}: LeNet on {config.dataset}, running on: {run.where(devices)}")
    if config.batch_size % store.num_workers:
        raise gp.errors.ConfigError(f"--batch_size {config.batch_size} is no multiple of {store.num_workers} processes")
    part = {"rank": store.rank, "num_workers": store.num_workers}  # of every batch

    data = gp.datasets.load(config.dataset, root=config.data_root)
    train = gp.datasets.batches(*data.train, config.batch_size // store.num_workers, True, config.seed, **part)
    test = gp.datasets.batches(*data.test, batch_size=256, **part)
    # As many training images as there are for testing tell the training accuracy well enough.
    num_seen = len(data.test.labels)
    seen = gp.datasets.batches(data.train.images[:num_seen], data.train.labels[:num_seen], batch_size=256, **part)

    gp.reseed(config.seed)
    _, channels, height, width = data.train.images.shape
    net = gp.models.LeNet(data.num_classes, channels, (height, width))
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize()
    optimizer = {"learning_rate": config.lr, "momentum": config.momentum, "wd": config.weight_decay}
    trainer = gluon.Trainer(net.collect_params(), "sgd", optimizer, kvstore=store)
    step = gp.DataParallel(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer)
    if run.state is not None:
        gp.checkpoint.restore(run.state, net, trainer, source=str(run.folder))

    schedule = mx.lr_scheduler.CosineScheduler(config.epochs, config.lr)  # so that the last epochs settle
    for epoch in range(run.position.epoch, config.epochs):
        trainer.set_learning_rate(schedule(epoch))
        progress = run.progress(train, epoch)
        train.set_epoch(epoch, start=progress.step)
        for images, labels in progress:
            gp.reseed(config.seed + store.rank, epoch + 1, progress.step)
            loss = step(images, labels)
            progress.add(loss, step.num_samples)
            if run.stop_requested:
                run.save(gp.checkpoint.state(net, trainer), epoch, within=progress)
        loss, rate, _ = progress.together(store)  # waits for the last step
        [(_, train_accuracy)] = gp.evaluate(net, seen, "acc", devices, store)
        [(_, test_accuracy)] = gp.evaluate(net, test, "acc", devices, store)
        run.report.add(
            epoch=epoch + 1,
            loss=loss,
            train_accuracy=train_accuracy,
            test_accuracy=test_accuracy,
            images_per_second=rate,
        )
        run.save(gp.checkpoint.state(net, trainer), epoch + 1, score=test_accuracy)

    checkpoint, picture = run.finish()
    run.tell(f"checkpoint: {checkpoint}\ncurves:     {picture}")


if __name__ == "__main__":
    sys.exit(gp.entry.start(main, Config, DEFAULT, description=__doc__))
