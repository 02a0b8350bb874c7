"""GluonCV's own training classes, and Gluon's Estimator, with our pieces swapped in.

    python scripts/gluoncv_with_gluon_parallel.py                          three loops on two CPU devices, a minute
    python scripts/gluoncv_with_gluon_parallel.py --loops estimator        one of them
    python scripts/gluoncv_with_gluon_parallel.py --model fcn              with GluonCV's FCN on ResNet-50
    gluon-parallel launch -n 2 --devices cpu:1 scripts/gluoncv_with_gluon_parallel.py     two processes, same numbers

Each loop learns to tell the pixels of handwritten digits from those of the photographs behind them. It is as GluonCV
writes it; what changes in a script of yours is marked:

(1) `gp.devices` lists the contexts, and sets MXNet up for several CPU devices.
(2) `gp.split_and_load` in place of Gluon's, which wants a batch that divides evenly.
(3) `gp.nn.SyncBatchNorm` in place of MXNet's, which waits for ever where a net has three of them on two CPU devices.
(4) Several processes: our store for the trainer, `mpi` under the launcher; and its sum over the processes is divided
    by their number, because `trainer.step(batch_size)` divides by the batch of one.
(5) Each process reads its own part of every batch, and metrics are merged.

What stays GluonCV's: the gradient of MixSoftmaxCrossEntropyLoss is a mean over the pixels of one device, and Gluon's
trainer adds the devices up. So the first two loops take steps on two devices that are twice as long as on one, and a
learning rate is one for a number of devices. `gp.DataParallel` with `gp.models.PixelLoss` does not depend on it.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from gluoncv.loss import MixSoftmaxCrossEntropyLoss
from gluoncv.model_zoo import FCN
from gluoncv.utils import LRScheduler
from gluoncv.utils.metrics import SegmentationMetric
from gluoncv.utils.parallel import DataParallelCriterion, DataParallelModel, Parallel, Parallelizable
from mxnet import autograd, gluon
from mxnet.gluon.contrib.estimator import BatchProcessor, Estimator

SIZE, BATCH_SIZE, AUX_WEIGHT, NUM_CLASSES = 64, 6, 0.5, 2


class Segmentation:
    """GluonCV's scripts/segmentation/train.py: DataParallelModel and DataParallelCriterion.

    ``sync=False``: one thread starts all devices, which is enough for our layer. Their ``sync=True``, made for MXNet's
    layer, starts a thread per device, and hybridized nets are not made for that.
    """

    def __init__(self, net, trainer, devices):
        loss = MixSoftmaxCrossEntropyLoss(aux=True, aux_weight=AUX_WEIGHT)
        self.model = DataParallelModel(net, devices, sync=False)
        self.criterion = DataParallelCriterion(loss, devices, sync=False)
        self.trainer = trainer

    def train(self, data, epochs):
        for _ in range(epochs):
            for images, masks in data:
                with autograd.record():
                    losses = self.criterion(self.model(images), masks)
                autograd.backward(losses)
                self.trainer.step(len(images))


class ForwardBackward(Parallelizable):
    """GluonCV's detection scripts: `Parallel` runs this for the shard of each device.

    ``Parallel(0, ...)``: with 0 threads it does so in this one, as above.
    """

    def __init__(self, net, trainer, devices):
        super().__init__()
        self.net, self.trainer, self.devices = net, trainer, devices
        self.loss = MixSoftmaxCrossEntropyLoss(aux=True, aux_weight=AUX_WEIGHT)

    def forward_backward(self, x):
        images, masks = x
        with autograd.record():
            loss = self.loss(*self.net(images), masks)
        loss.backward()
        return loss

    def train(self, data, epochs):
        workers = Parallel(0, self)
        for _ in range(epochs):
            for images, masks in data:
                for shard in gp.split_and_load((images, masks), self.devices):  # (2)
                    workers.put(shard)
                for _ in self.devices:
                    workers.get()
                self.trainer.step(len(images))


class Split(BatchProcessor):
    """How an Estimator's batch becomes shards."""

    def _get_data_and_label(self, batch, ctx, batch_axis=0):
        shards = gp.split_and_load((batch[0], batch[1]), ctx, batch_axis)  # (2)
        return [images for images, _ in shards], [masks for _, masks in shards]


class FirstOutput(gluon.HybridBlock):
    """A net without its auxiliary output: an Estimator's metrics want one."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def hybrid_forward(self, F, images):
        return self.net(images)[0]


class WithEstimator:
    """Gluon's Estimator."""

    def __init__(self, net, trainer, devices):
        self.estimator = Estimator(
            FirstOutput(net), gluon.loss.SoftmaxCrossEntropyLoss(axis=1), trainer=trainer, context=devices,
            train_metrics=mx.metric.Accuracy(), batch_processor=Split(),
        )  # fmt: skip

    def train(self, data, epochs):
        self.estimator.fit(data, epochs=epochs)


LOOPS: dict[str, Any] = {"segmentation": Segmentation, "parallel": ForwardBackward, "estimator": WithEstimator}


def make_net(model: str, num_classes: int, devices: list[mx.Context], store: Any) -> gluon.HybridBlock:
    """A net with two outputs, the second for the auxiliary loss, as GluonCV's are."""
    norm: dict[str, Any] = {"norm_layer": gp.nn.SyncBatchNorm, "norm_kwargs": {"kvstore": store}}  # (3)
    if model == "small":
        net: Any = gp.models.SmallFCN(num_classes, aux=True, **norm)
    else:
        net = FCN(num_classes, "resnet50", ctx=devices, pretrained_base=False, crop_size=SIZE, **norm)
    net.initialize(mx.init.Xavier(), ctx=devices, force_reinit=True)
    net.hybridize()
    return net


def make_trainer(net: gluon.HybridBlock, store: Any, num_steps: int) -> gluon.Trainer:
    """SGD with GluonCV's poly schedule."""
    schedule = LRScheduler("poly", base_lr=0.1, niters=num_steps, power=0.9)
    optimizer = {"lr_scheduler": schedule, "momentum": 0.9, "rescale_grad": 1 / store.num_workers}  # (4)
    return gluon.Trainer(net.collect_params(), "sgd", optimizer, kvstore=store, update_on_kvstore=False)  # (4)


def read(data_root: str, store: Any, num_train: int) -> list[gluon.data.DataLoader]:
    """Training and test scenes, in batches of which this process has its part; masks are 1 where a digit is."""
    folder = gp.datasets.scenes.write(data_root, num_train, num_test=4 * BATCH_SIZE, size=SIZE)
    loaders = []
    for split in ("train", "test"):
        images, masks = zip(*gp.datasets.voc.Segmentation(folder, split, gp.datasets.scenes.CLASSES))
        samples = gluon.data.ArrayDataset(gp.datasets.pictures.as_input(images), [np.sign(mask) for mask in masks])
        part = {"rank": store.rank, "num_workers": store.num_workers}
        sampler = gp.sampler.BatchSampler(len(samples), BATCH_SIZE // store.num_workers, shuffle=True, **part)  # (5)
        loaders.append(gluon.data.DataLoader(samples, batch_sampler=sampler))
    return loaders


def score(net: gluon.HybridBlock, test: Any, devices: list[mx.Context], store: Any) -> tuple[float, float]:
    """Pixel accuracy and mIoU over the test scenes of all processes."""
    metric = SegmentationMetric(NUM_CLASSES)
    gp.evaluate(net, test, metric, devices, store)  # (5)
    return metric.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS), help="which ones (default: all)")
    parser.add_argument("--model", choices=["small", "fcn"], default="small", help="the net (default: small)")
    parser.add_argument("--devices", default="auto", help="where to train: auto, cpu:2, gpu:4 (default: auto)")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the images (default: 12)")
    parser.add_argument("--num_train", type=int, default=120, help="images to train with (default: 120)")
    parser.add_argument("--data_root", help="folder of the data sets' files")
    args = parser.parse_args()

    devices = gp.devices(args.devices)  # (1)
    for name in args.loops:
        store = gp.kvstore.create("auto")  # (4) one for each trainer
        data, test = read(args.data_root, store, args.num_train)
        gp.reseed(0)
        net = make_net(args.model, NUM_CLASSES, devices, store)
        loop = LOOPS[name](net, make_trainer(net, store, args.epochs * len(data)), devices)
        before = score(net, test, devices, store)
        loop.train(data, args.epochs)
        after = score(net, test, devices, store)
        if store.rank == 0:
            print("{}: pixel accuracy {:.4f}, mIoU {:.4f}".format(name, *after), end=" ")
            print("(before training: {:.4f}, {:.4f})".format(*before), flush=True)


if __name__ == "__main__":
    main()
