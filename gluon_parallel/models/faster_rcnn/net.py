"""Faster R-CNN nets: GluonCV's class on a small backbone, or a net of its model zoo; and what they detect."""

import functools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import gluoncv
from gluoncv.model_zoo.rcnn.faster_rcnn import predefined_models
from gluoncv.model_zoo.rcnn.faster_rcnn.faster_rcnn import FasterRCNN
from gluoncv.nn.coder import MultiPerClassDecoder

from ...errors import ConfigError
from ...mxnet.compat import mx
from ...mxnet.parameters import has_values
from ...nn import SyncBatchNorm, sync_batch_norm_symbol
from ...split import as_devices
from ..pretrained import published_weights

nn = mx.gluon.nn

NORMS = ("sync_batch_norm", "batch_norm", "none")


def small(
    classes: Sequence[str], norm: str = "sync_batch_norm", max_boxes: int = 16, channels: int = 32, **sync: Any
) -> FasterRCNN:
    """GluonCV's ``FasterRCNN``, not initialised, for images of about 128 x 128 pixels; trains on CPUs within minutes.

    Six convolutions make features of a stride of 8 pixels. The anchors have the areas of squares of 20, 28 and 39
    pixels and are upright, as digits are.

    Args:
        classes: names of what there is to find.
        norm: "sync_batch_norm" over all devices (and processes, with `kvstore`), "batch_norm" or "none".
        max_boxes: of an image in training at most.
        channels: of the first convolution; the widest has four times as many.
        sync: arguments of :class:`gluon_parallel.nn.SyncBatchNorm`: `kvstore`, `num_devices`, `timeout`.

    Raises:
        ConfigError: there is no such norm.

    Example:
        >>> net = small(["cat", "dog"])
        >>> net.initialize()
        >>> [output.shape for output in net(mx.nd.zeros((1, 3, 128, 128)))]  # classes, scores, boxes
        [(1, 80, 1), (1, 80, 1), (1, 80, 4)]
    """
    if norm not in NORMS:
        raise ConfigError(f"norm: {norm!r} is none of {', '.join(NORMS)}")

    def convolution(in_channels, out_channels, stride=1):
        yield nn.Conv2D(out_channels, 3, stride, 1, in_channels=in_channels, use_bias=norm == "none")
        if norm == "sync_batch_norm":
            yield SyncBatchNorm(in_channels=out_channels, **sync)
        elif norm == "batch_norm":
            yield nn.BatchNorm(in_channels=out_channels)
        yield nn.Activation("relu")

    # What goes to the box head is narrow: to cut proposals out of it is a large part of a step.
    widths = [channels * factor for factor in (1, 1, 2, 3, 4, 2)]
    features, box_features = nn.HybridSequential(), nn.HybridSequential()
    for in_channels, out_channels, stride in zip([3, *widths], widths, (2, 1, 2, 1, 2, 1)):
        features.add(*convolution(in_channels, out_channels, stride))
    box_features.add(
        *convolution(widths[-1], channels * 2),
        nn.Dense(128, in_units=channels * 2 * 7 * 7, weight_initializer=mx.init.Xavier()),
        nn.Activation("relu"),
    )
    return FasterRCNN(
        features, None, tuple(classes), box_features, short=128, max_size=128, nms_thresh=0.3, nms_topk=40,
        roi_size=(7, 7), strides=8, clip=4.14, rpn_channel=channels * 2, base_size=8, scales=(2.5, 3.5, 4.9),
        ratios=(1.1, 1.9), alloc_size=(64, 64), rpn_nms_thresh=0.7, rpn_train_pre_nms=400, rpn_train_post_nms=100,
        rpn_test_pre_nms=300, rpn_test_post_nms=40, rpn_min_size=4, num_sample=32, pos_ratio=0.5, max_num_gt=max_boxes,
    )  # fmt: skip


def from_zoo(name: str, classes: Sequence[str], num_devices: int = 1, **sync: Any) -> FasterRCNN:
    """A ``FasterRCNN`` of GluonCV's model zoo, not initialised, with these classes.

    Where its name says ``syncbn``, GluonCV's code gets our SyncBatchNorm in place of MXNet's: in the backbone, the
    feature pyramid (where it is a symbol) and the box head. With `kvstore` they meet over the processes too.

    Args:
        name: ``faster_rcnn_resnet50_v1b_voc``, ``faster_rcnn_fpn_syncbn_resnet50_v1b_coco`` or another Faster R-CNN.
        classes: names of what there is to find.
        num_devices: how many devices of this process take part.
        sync: more arguments of :class:`gluon_parallel.nn.SyncBatchNorm`.

    Raises:
        ConfigError: there is no such net; the message lists them.
    """
    names = [known for known in predefined_models.__all__ if known.startswith("faster") and "custom" not in known]
    if name not in names:
        raise ConfigError(f"model: there is no {name!r}. The right ones are: small, {', '.join(names)}")
    options = {"num_devices": num_devices} if "syncbn" in name else {}
    layer, symbol = functools.partial(SyncBatchNorm, **sync), functools.partial(sync_batch_norm_symbol, **sync)
    # While the net is built, GluonCV finds our layer and our symbol where it looks for MXNet's.
    with mock.patch.object(predefined_models, "SyncBatchNorm", layer), \
            mock.patch.object(mx.sym.contrib, "SyncBatchNorm", symbol):  # fmt: skip
        net = gluoncv.model_zoo.get_model(name, pretrained_base=False, **options)
    if len(classes) != net.num_class:  # `net.reset_class` is for a net that has weights
        with net.name_scope():
            net.class_predictor = nn.Dense(len(classes) + 1, weight_initializer=mx.init.Normal(0.01))
            net.box_predictor = nn.Dense(len(classes) * 4, weight_initializer=mx.init.Normal(0.001))
            net.cls_decoder = MultiPerClassDecoder(num_class=len(classes) + 1)
        net.num_class = len(classes)
    net.classes = tuple(classes)
    return net


def initialize(net: FasterRCNN, devices: Sequence[Any]) -> None:
    """Give every parameter that has no values yet its first ones, and let only those be trained that GluonCV trains.

    A feature pyramid's parameters are a symbol's, which do not say how they begin; their names do.
    """
    begins = {"gamma": mx.init.One(), "var": mx.init.One(), "beta": mx.init.Zero(), "mean": mx.init.Zero(),
              "bias": mx.init.Zero()}  # fmt: skip
    trained, devices = net.collect_train_params(), as_devices(devices)
    for name, parameter in net.collect_params().items():
        if not has_values(parameter):
            parameter.initialize(ctx=devices, default_init=begins.get(name.split("_")[-1], mx.init.Xavier()))
        if name not in trained:
            parameter.grad_req = "null"


def load_backbone(net: FasterRCNN, name: str, file: str, devices: Sequence[Any]) -> Path:
    """Give the net's ResNet the weights that it learnt from ImageNet's photographs; returns their file.

    Args:
        net: made by :func:`from_zoo`.
        name: the name that it was made with.
        file: a ``.params`` file of GluonCV's classifier with that ResNet; or "zoo", for the one that GluonCV publishes,
            where :func:`gluon_parallel.models.published_weights` finds it.
        devices: where the weights go.

    Raises:
        ConfigError: the file is not there, or holds the weights of another net.
    """
    found = re.search(r"resnet\d+_v1[bd]|resnest\d+", name)
    if found is None:
        raise ConfigError(f"pretrained: {name} has no backbone with published weights; write pretrained: null")
    path = published_weights(found.group()) if file == "zoo" else Path(file).expanduser()
    classifier = gluoncv.model_zoo.get_model(found.group())
    try:
        classifier.load_parameters(str(path))
    except (OSError, ValueError, AssertionError, mx.MXNetError) as error:
        said = str(error).strip().splitlines()[0]
        raise ConfigError(f"pretrained: {path} does not hold the weights of {found.group()}: {said}") from error
    given, devices = classifier.collect_params(), as_devices(devices)
    for key, parameter in net.collect_params().items():
        if key in given:
            parameter.shape = given[key].shape
            parameter.initialize(ctx=devices, force_reinit=True)
            parameter.set_data(given[key].data())
    return path


def detect(net: Any, images: Iterable[np.ndarray], devices: Sequence[Any], most: int = 100) -> Iterator[np.ndarray]:
    """Find objects. While the results of some images are read, the devices work on the next.

    Args:
        net: a ``FasterRCNN``, initialised on all `devices`.
        images: (3, H, W) float32 each, normalised; of any sizes.
        devices: list of ``mx.Context``.
        most: objects per image, the surest ones.

    Yields:
        For each image, in their order, (N, 6) float32: xmin, ymin, xmax, ymax, class, score; the surest first.
    """
    devices = as_devices(devices)
    waiting: deque[tuple[tuple[int, ...], Any]] = deque()
    for number, image in enumerate(images):
        device = devices[number % len(devices)]
        with mx.autograd.pause(train_mode=False):
            outputs = net(mx.nd.array(image[None], ctx=device))
        waiting.append((image.shape[1:], outputs))
        if len(waiting) > len(devices):
            yield _read(waiting.popleft(), most)
    while waiting:
        yield _read(waiting.popleft(), most)


def _read(result, most):
    size, outputs = result
    labels, scores, boxes = (output.asnumpy()[0] for output in outputs)
    found = np.concatenate([boxes, labels, scores], axis=1)
    found = found[found[:, 4] >= 0]
    found = found[np.argsort(-found[:, 5], kind="stable")[:most]]
    found[:, 0:4:2] = found[:, 0:4:2].clip(0, size[1] - 1)
    found[:, 1:4:2] = found[:, 1:4:2].clip(0, size[0] - 1)
    return found
