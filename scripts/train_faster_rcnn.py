"""Train Faster R-CNN on several devices: GluonCV's nets, or a small one that learns on two CPU cores.

    python scripts/train_faster_rcnn.py                                                 scenes of handwritten digits
    python scripts/train_faster_rcnn.py --config configs/faster_rcnn/voc.yaml           Pascal VOC 2007 and 2012
    python scripts/train_faster_rcnn.py --config configs/faster_rcnn/fpn_sync_bn.yaml   COCO, with a feature pyramid
    python scripts/train_faster_rcnn.py --resume                                        continue the newest run
    gluon-parallel launch -n 2 --devices cpu:1 scripts/train_faster_rcnn.py             two processes, the same steps

Every run gets a folder of its own, runs/faster_rcnn/<config>/<number>, with pictures of what was found in each epoch.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any, Optional

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from gluoncv.utils.metrics import VOC07MApMetric
from mxnet import gluon

DEFAULT = Path(__file__).resolve().parent.parent / "configs" / "faster_rcnn" / "default.yaml"
MILLION = 1_000_000
SMALL = ("model", ["small"])
option = gp.config.option


@dataclasses.dataclass(frozen=True)
class Config(gp.config.MixedPrecisionConfig):
    dataset: str = option(
        "scenes, voc or coco; the last two also for boxes of your own, in that layout below --data_root"
    )
    classes: Optional[str] = option(
        "of boxes of your own: screw,nut or a file with one name per line; null for those of the data set"
    )
    model: str = option("small, or a Faster R-CNN of GluonCV's model zoo such as faster_rcnn_resnet50_v1b_voc")
    pretrained: Optional[str] = option("the backbone's weights: a file, zoo for GluonCV's own, null for random ones")
    norm: str = option("of the small net: sync_batch_norm, batch_norm or none", only_for=SMALL)
    channels: gp.config.PositiveInt = option("of the small net's first convolution", only_for=SMALL)
    num_train: Optional[gp.config.PositiveInt] = option("images to train with; null for all")
    num_test: Optional[gp.config.PositiveInt] = option("images to test with; null for all")
    short: gp.config.PositiveInt = option("pixels of an image's shorter side")
    longest: gp.config.PositiveInt = option("pixels of the longer side at most")
    max_boxes: gp.config.PositiveInt = option("of one image")
    horizontal_flip: bool = option("mirror every other image")
    crop: gp.config.PositiveFloat = option("every other image is cut to a part with sides of at least this share")
    momentum: gp.config.NonNegativeFloat = option("how much of the last step goes into the next one")
    weight_decay: gp.config.NonNegativeFloat = option("how strongly large weights are pulled towards 0")
    clip_global_norm: Optional[gp.config.PositiveFloat] = option("gradients are scaled down to this norm")
    warmup_epochs: gp.config.NonNegativeFloat = option("epochs over which the learning rate rises from a tenth to lr")
    lr_decay_epochs: str = option("epochs after which the learning rate falls to a tenth, such as 8,10")
    rpn_samples: gp.config.PositiveInt = option("anchors per image that the RPN learns from")
    rpn_positive: gp.config.PositiveFloat = option("anchors that overlap an object by this much are to find it")
    rpn_negative: gp.config.PositiveFloat = option("anchors that overlap every object by less are background")
    evaluate_every: gp.config.PositiveInt = option("epochs between evaluations")
    num_pictures: gp.config.PositiveInt = option("test images that are drawn after each evaluation")
    num_workers: gp.config.NonNegativeInt = option("threads that read images ahead")


def load(config: Config) -> tuple[Any, Any]:
    """The images to train with and to test with; scenes are drawn at the size that the net sees."""
    data = gp.datasets.detection.load(
        config.dataset, config.data_root, config.num_train, config.num_test, broken="skip",
        in_memory=config.dataset == "scenes", size=config.short, classes=names_of_classes(config),
    )  # fmt: skip
    return data.train, data.test


def names_of_classes(config: Config) -> Optional[list[str]]:
    """The names that were given, or None."""
    if config.classes is None:
        return None
    path = Path(config.classes).expanduser()
    lines = path.read_text("utf-8").splitlines() if path.is_file() else config.classes.split(",")
    names = [line.strip() for line in lines if line.strip()]
    if not names or len({*names}) < len(names):
        raise gp.errors.ConfigError(
            f"--classes {config.classes}: expected different names, or a file of them; got {names}"
        )
    if config.dataset == "scenes":
        raise gp.errors.ConfigError("--classes: scenes have the digits as classes; name --dataset voc or coco")
    return names


def make_net(config: Config, classes: tuple[str, ...], devices: list[mx.Context], store: Any) -> Any:
    """A net with its first weights, on all devices."""
    rcnn = gp.models.faster_rcnn
    sync = {"kvstore": store} if store.num_workers > 1 else {}
    if config.model == "small":
        net = rcnn.small(classes, config.norm, config.max_boxes, config.channels, **sync)
    else:
        net = rcnn.from_zoo(config.model, classes, len(devices), **sync)
    if config.pretrained is not None:
        rcnn.load_backbone(net, config.model, config.pretrained, devices)
    rcnn.initialize(net, devices)
    return net


def check(config: Config) -> None:
    """Refuse settings that contradict each other, before the data are read."""
    learning_rates(config)
    names_of_classes(config)
    for wrong, text in (
        (config.crop > 1, f"--crop {config.crop:g}: a part has at most the whole sides, 1 (nothing is cut off then)"),
        (config.rpn_negative > config.rpn_positive,
         f"--rpn_negative {config.rpn_negative:g} is above --rpn_positive {config.rpn_positive:g}"),
        (config.short > config.longest, f"--short {config.short} is above --longest {config.longest}"),
        (config.dataset == "scenes" and config.short < 32, f"--short {config.short}: scenes have 32 pixels at least"),
    ):  # fmt: skip
        if wrong:
            raise gp.errors.ConfigError(text)


def learning_rates(config: Config) -> mx.lr_scheduler.LRScheduler:
    """The learning rate at some point of training, counted in millionths of an epoch: MXNet takes whole numbers."""
    try:
        decays = [round(MILLION * float(epoch)) for epoch in config.lr_decay_epochs.split(",") if epoch]
        return mx.lr_scheduler.MultiFactorScheduler(
            [decay - 1 for decay in decays] or [config.epochs * MILLION], 0.1, config.lr,  # it falls after these
            warmup_steps=round(MILLION * config.warmup_epochs), warmup_begin_lr=0.1 * config.lr,
        )  # fmt: skip
    except ValueError:
        raise gp.errors.ConfigError(
            f"--lr_decay_epochs is {config.lr_decay_epochs!r}, wanted rising epochs such as 8,10, or nothing"
        ) from None


def find(net: Any, dataset: Any, numbers: Any, config: Config, devices: list[mx.Context]) -> Any:
    """Yield (image, label, found) of the data set's images with these numbers, in pixels of the image as it is."""
    resize = gp.datasets.detection.resize(config.short, config.longest)
    nothing = np.zeros((0, 6), np.float32)

    def prepared(number):
        image, _ = resize(dataset[number][0], nothing, np.random.RandomState(0))  # which it does not use
        return gp.datasets.pictures.as_input([image])[0], image.shape[:2]

    inputs, sizes = itertools.tee(map(prepared, numbers))
    found_boxes = gp.models.faster_rcnn.detect(net, (image for image, _ in inputs), devices)
    for number, (_, (height, width)), found in zip(numbers, sizes, found_boxes):
        image, label = dataset[number]
        down, across = image.shape[0] / height, image.shape[1] / width
        found[:, :4] = (found[:, :4] + [0, 0, 1, 1]) * [across, down, across, down] - [0, 0, 1, 1]  # as it was resized
        yield image, label, found


def make_metric(config: Config, dataset: Any) -> Any:
    """What average precision is on this data set. COCO's needs pycocotools, which had better be missed now."""
    if config.dataset == "coco":
        return gp.metrics.COCOMeanAP(dataset.annotations, dataset.category_ids)
    return VOC07MApMetric(iou_thresh=0.5, class_names=list(dataset.classes))


def evaluate(
    net: Any, dataset: Any, metric: Any, config: Config, devices: list[mx.Context], store: Any
) -> tuple[float, list]:
    """The mean average precision over all processes, and the first images for a picture."""
    numbers = range(store.rank, len(dataset), store.num_workers)
    coco = config.dataset == "coco"
    metric.reset()
    rows: list[Any] = []
    for number, (image, label, found) in zip(numbers, find(net, dataset, numbers, config, devices)):
        predicted = found[None, :, :4], found[None, :, 4], found[None, :, 5]
        if coco:
            metric.update([dataset.image_ids[number]], *predicted)
        else:
            metric.update(*predicted, label[None, :, :4], label[None, :, 4], label[None, :, 5])
        if len(rows) < config.num_pictures:
            rows.append(gp.pictures.boxes(image, label, found))
    values = dict(gp.metrics.merge(metric, store).get_name_value())
    return float(values["AP" if coco else "mAP"]), rows


def main(config: Config, run: gp.Run) -> None:
    devices, store = gp.devices(config.devices), gp.kvstore.create(config.kvstore)  # where we run
    rcnn, detection = gp.models.faster_rcnn, gp.datasets.detection
    check(config)

    train_set, test_set = load(config)
    metric = make_metric(config, test_set)
    if train_set.max_boxes > config.max_boxes:  # the batch with that image may be hours away
        raise gp.errors.ConfigError(
            f"an image has {train_set.max_boxes} boxes, more than max_boxes: {config.max_boxes}; raise max_boxes"
        )
    net = make_net(config, train_set.classes, devices, store)
    in_training = rcnn.Training(net)
    in_training.hybridize()

    targets = rcnn.Targets(
        net, config.max_boxes, gp.datasets.pictures.as_input, config.rpn_samples, config.rpn_positive,
        config.rpn_negative,
    )  # fmt: skip
    alter = [detection.without_difficult, *([detection.flip] if config.horizontal_flip else []),
             *([detection.crop(config.crop)] if config.crop < 1 else []),
             detection.resize(config.short, config.longest)]  # fmt: skip
    train = gp.datasets.samples.SampleBatches(
        train_set, targets.collate, config.batch_size, targets.mark(detection.compose(*alter)),
        shuffle=True, seed=config.seed, last_batch="keep", num_threads=config.num_workers,
    )  # fmt: skip

    optimizer = {"learning_rate": config.lr, "momentum": config.momentum, "wd": config.weight_decay}
    trainer = gluon.Trainer(net.collect_train_params(), "sgd", optimizer, kvstore=store)
    step = gp.DataParallel(in_training, rcnn.Loss(), trainer, clip_global_norm=config.clip_global_norm)
    schedule = learning_rates(config)

    # What is saved is the net that finds objects; what computes its loss has no parameters of its own.
    loop = gp.Loop(train, net=net, trainer=trainer, store=store, seed=config.seed, run=run)
    loop.print(f"{run.folder}: Faster R-CNN on {config.dataset}, running on: {loop} x {devices}")
    loop.print(f"{train_set.report}\n{test_set.report}")
    for epoch in loop.epochs(config.epochs, config.patience):
        for images, boxes, classes, draws, *labels in loop.loaders[0]:
            trainer.set_learning_rate(schedule(MILLION * loop.num_steps // len(train)))
            loss = step((images, boxes, classes, draws), labels)
            loop.add(loss, step.num_samples, step.parts)
        score = {}
        if (epoch + 1) % config.evaluate_every == 0 or epoch + 1 == config.epochs:
            score["map"], rows = evaluate(net, test_set, metric, config, devices, store)
            if loop.is_main:
                gp.pictures.sheet(rows, run.folder / "pictures" / f"epoch-{epoch + 1:04d}.png", test_set.classes,
                                  f"epoch {epoch + 1}: mAP {score['map']:.1%}")  # fmt: skip
        loop.end_epoch(score=score.get("map"), **score)

    if loop.is_main:
        found = find(net, test_set, range(min(24, len(test_set))), config, devices)
        sheet = gp.pictures.sheet([gp.pictures.boxes(*each) for each in found], run.folder / "contact_sheet.png",
                                  test_set.classes, str(run.folder), across=3)  # fmt: skip
        loop.print(f"pictures:   {sheet}")


if __name__ == "__main__":
    sys.exit(gp.start(main, Config, DEFAULT, description=__doc__))
