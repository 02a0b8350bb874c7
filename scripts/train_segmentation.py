"""Train a net that names the class of every pixel, on several devices, with batch norm over all of them.

    python scripts/train_segmentation.py                                  a small FCN on scenes of handwritten digits
    python scripts/train_segmentation.py --config configs/segmentation/voc_pspnet.yaml --data_root VOCdevkit
    python scripts/train_segmentation.py --norm batch_norm                each device with the statistics of its own
    python scripts/train_segmentation.py --resume                         continue the newest run, bit for bit
    gluon-parallel launch -n 2 --devices cpu:1 scripts/train_segmentation.py     two processes, the same numbers

Every run gets a folder of its own, runs/segmentation/<config>/<number>, with pictures of what the net sees.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Optional

import gluon_parallel as gp
import mxnet as mx
from gluoncv.model_zoo import FCN, DeepLabV3, PSPNet
from gluoncv.utils.metrics import SegmentationMetric
from mxnet import gluon

DEFAULT = Path(__file__).resolve().parent.parent / "configs" / "segmentation" / "default.yaml"
ZOO = {"fcn": FCN, "pspnet": PSPNet, "deeplab": DeepLabV3}
BACKBONES = {"resnet18": "resnet18_v1b", "resnet34": "resnet34_v1b", "resnet50": "resnet50_v1s",
             "resnet101": "resnet101_v1s", "resnet152": "resnet152_v1s"}  # fmt: skip
FROM_ZOO = ("model", list(ZOO))
option = gp.config.option


@dataclasses.dataclass(frozen=True)
class Config(gp.config.MixedPrecisionConfig):
    dataset: str = option("scenes, or voc with --data_root VOCdevkit, the folder that holds VOC2012")
    num_train: Optional[gp.config.PositiveInt] = option("images to train with; null for all")
    num_test: Optional[gp.config.PositiveInt] = option("images to test with; null for all")
    size: gp.config.PositiveInt = option("pixels per side of what the net sees, a multiple of 16")
    min_scale: gp.config.PositiveFloat = option("training images have at least this times `size` pixels per side")
    max_scale: gp.config.PositiveFloat = option("and at most this times `size`; a part of `size` is cut out")
    horizontal_flip: bool = option("mirror every other training image")
    model: str = option("small, or fcn, pspnet, deeplab from GluonCV")
    backbone: str = option("of GluonCV's nets: resnet50, resnet101, ...", only_for=FROM_ZOO)
    pretrained: Optional[str] = option("the backbone's weights: zoo for GluonCV's own, null for random ones",
                                       only_for=FROM_ZOO)  # fmt: skip
    norm: str = option("sync_batch_norm (over all devices and processes) or batch_norm (each device by itself)")
    aux_weight: gp.config.NonNegativeFloat = option("how much the auxiliary output counts; 0: there is none")
    background_weight: gp.config.NonNegativeFloat = option("how much a pixel of the background counts in the loss")
    optimizer: str = option("sgd or adam")
    momentum: gp.config.NonNegativeFloat = option("how much of the last step goes into the next one",
                                                  only_for=("optimizer", ["sgd"]))  # fmt: skip
    weight_decay: gp.config.NonNegativeFloat = option("how strongly large weights are pulled towards 0")
    power: gp.config.PositiveFloat = option("the learning rate falls as (what remains of the training) to this power")
    test_batch_size: gp.config.PositiveInt = option("test images per step")
    num_workers: gp.config.NonNegativeInt = option("threads that read images ahead")


def choose(key: str, value: str, known: Iterable[str]) -> str:
    """The value, or an error that says which ones there are."""
    if value not in known:
        raise gp.errors.ConfigError(f"--{key} is {value!r}, wanted one of {', '.join(known)}")
    return value


def read(config: Config) -> tuple[Any, Any]:
    """The images with masks to train and to test with; scenes are drawn at the size that the net sees."""
    data = gp.datasets.segmentation.load(
        config.dataset, config.data_root, config.num_train, config.num_test, broken="skip",
        in_memory=config.dataset == "scenes", size=config.size,
    )  # fmt: skip
    return data.train, data.test


def build(config: Config, num_classes: int, devices: list[mx.Context], store: Any) -> gluon.HybridBlock:
    """The net with its first weights, on all devices."""
    norm: dict[str, Any] = {"norm_layer": gluon.nn.BatchNorm}
    if choose("norm", config.norm, ("sync_batch_norm", "batch_norm")) == "sync_batch_norm":
        norm = {"norm_layer": gp.nn.SyncBatchNorm, "norm_kwargs": {"kvstore": store}}
    aux = config.aux_weight > 0
    if choose("model", config.model, ("small", *ZOO)) == "small":
        net: gluon.HybridBlock = gp.models.SmallFCN(num_classes, aux=aux, **norm)
        net.initialize(mx.init.Xavier(magnitude=2), ctx=devices)
        return net
    if config.pretrained is not None:
        choose("pretrained", config.pretrained, ["zoo"])
        gp.models.published_weights(BACKBONES.get(config.backbone, config.backbone))  # GluonCV then finds them too
    net = ZOO[config.model](
        num_classes, config.backbone, aux, devices, config.pretrained is not None, crop_size=config.size, **norm
    )  # fmt: skip
    if config.pretrained is None:  # GluonCV has given weights to the heads alone
        net.initialize(mx.init.Xavier(magnitude=2), ctx=devices, force_reinit=True)
    return net


def show(net: gluon.HybridBlock, samples: Any, classes: Sequence[str], number: int, path: Path, title: str) -> None:
    """Write images, truth and prediction side by side."""
    samples.set_epoch(0)  # the same parts of the test images every time
    rows: list[Any] = []
    for images, masks in samples:
        inputs = mx.nd.array(images[: number - len(rows)], ctx=net.collect_params().list_ctx()[0])
        predictions = net(inputs)[0].argmax(axis=1).asnumpy().astype(int)
        rows += map(gp.pictures.masks, map(gp.datasets.pictures.as_picture, images), masks, predictions)
        if len(rows) == number:
            break
    gp.pictures.sheet(rows, path, classes, title, across=3)


def main(config: Config, run: gp.Run) -> None:
    devices, store = gp.devices(config.devices), gp.kvstore.create(config.kvstore)  # where we run
    if config.size % 16:
        raise gp.errors.ConfigError(f"--size {config.size} is no multiple of 16: the nets halve an image four times")
    if config.min_scale > config.max_scale:
        raise gp.errors.ConfigError(f"--min_scale {config.min_scale:g} is above --max_scale {config.max_scale:g}")

    train_set, test_set = read(config)
    change, classes = gp.datasets.segmentation, train_set.classes
    alter = [change.resize(config.size, (config.min_scale, config.max_scale)), change.crop(config.size)]
    alter += [change.flip] if config.horizontal_flip else []
    train = change.batches(train_set, config.batch_size, change.compose(*alter), shuffle=True, seed=config.seed,
                           num_threads=config.num_workers)  # fmt: skip
    same_size = change.compose(change.resize(config.size), change.crop(config.size))
    test = change.batches(test_set, config.test_batch_size, same_size, num_threads=config.num_workers)

    net = build(config, len(classes), devices, store)
    net.hybridize()
    optimizer = {"learning_rate": config.lr, "wd": config.weight_decay}
    if choose("optimizer", config.optimizer, ("sgd", "adam")) == "sgd":
        optimizer["momentum"] = config.momentum
    trainer = gluon.Trainer(net.collect_params(), config.optimizer, optimizer)
    criterion = gp.models.PixelLoss(config.aux_weight, config.background_weight)
    criterion.hybridize()
    metric = SegmentationMetric(len(classes))
    schedule = mx.lr_scheduler.PolyScheduler(config.epochs * len(train), config.lr, config.power)

    training, train, shared_test = gp.prepare(
        net, criterion, trainer, train, test, store=store, seed=config.seed, run=run
    )  # fmt: skip
    training.print(f"{run.folder}: {config.model} with {config.norm} on {config.dataset}, running on: {training}")
    training.print(f"{train_set.report}\n{test_set.report}")
    for epoch in training.epochs(config.epochs, config.patience):
        for images, masks in train:
            trainer.set_learning_rate(schedule(training.num_steps))
            training.step(images, masks)  # a mean over the pixels of all processes
        shared_test.set_epoch(0)  # the same parts of the test images every time
        training.evaluate(shared_test, metric)
        pixel_accuracy, miou = metric.get()
        if training.is_main:
            path = run.folder / "pictures" / f"epoch-{epoch + 1:04d}.png"
            show(net, test, classes, 3, path, f"epoch {epoch + 1}: mIoU {miou:.1%}")
        training.end_epoch(score=miou, pixel_accuracy=pixel_accuracy, miou=miou)

    if training.is_main:
        show(net, test, classes, 12, run.folder / "sheet.png", f"{run.folder}: {config.model}, {config.norm}")
        training.print(f"sheet:      {run.folder / 'sheet.png'}")


if __name__ == "__main__":
    sys.exit(gp.start(main, Config, DEFAULT, description=__doc__))
