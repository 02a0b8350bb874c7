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
class Config(gp.config.MixedPrecisionConfig):
    momentum: gp.config.NonNegativeFloat = gp.config.option("how much of the last step goes into the next one")
    weight_decay: gp.config.NonNegativeFloat = gp.config.option("how strongly large weights are pulled towards 0")


def main(config: Config, run: gp.Run) -> None:
    data = gp.datasets.load(config.dataset, root=config.data_root)
    train = gp.datasets.batches(*data.train, config.batch_size, shuffle=True, seed=config.seed)
    test = gp.datasets.batches(*data.test, batch_size=256)
    # As many training images as there are for testing tell the training accuracy well enough.
    num_seen = len(data.test.labels)
    seen = gp.datasets.batches(data.train.images[:num_seen], data.train.labels[:num_seen], batch_size=256)

    _, channels, height, width = data.train.images.shape
    net = gp.models.LeNet(data.num_classes, channels, (height, width))
    net.initialize(mx.init.Xavier(), ctx=gp.devices(config.devices))
    net.hybridize()
    optimizer = {"learning_rate": config.lr, "momentum": config.momentum, "wd": config.weight_decay}
    trainer = gluon.Trainer(net.collect_params(), "sgd", optimizer)
    schedule = mx.lr_scheduler.CosineScheduler(config.epochs, config.lr)  # so that the last epochs settle

    training, train, test, seen = gp.prepare(
        net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, train, test, seen,
        store=config.kvstore, seed=config.seed, run=run,
    )  # fmt: skip
    training.print(f"{run.folder}: LeNet on {config.dataset}, running on: {training}")
    for epoch in training.epochs(config.epochs, config.patience):
        trainer.set_learning_rate(schedule(epoch))
        for images, labels in train:
            training.step(images, labels)
        [(_, train_accuracy)] = training.evaluate(seen, "acc")
        [(_, test_accuracy)] = training.evaluate(test, "acc")
        training.end_epoch(score=test_accuracy, train_accuracy=train_accuracy, test_accuracy=test_accuracy)


if __name__ == "__main__":
    sys.exit(gp.start(main, Config, DEFAULT, description=__doc__))
