"""Calls of GluonCV's losses and transforms, by name, on small inputs; `gluoncv_functions.py` runs them."""

from __future__ import annotations

import importlib
from typing import Any, Callable

import numpy as np
from PIL import Image

import mxnet as mx
from mxnet import autograd, nd

Case = Callable[[], Any]

SIZE = (80, 60)  # width and height of the image
JOINTS = ((1, 2),)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def module(name: str) -> Any:
    """A module of GluonCV."""
    return importlib.import_module(f"gluoncv.{name}")


def uniform(*shape: int, low: float = 0.0, high: float = 1.0, seed: int = 3) -> np.ndarray:
    return np.random.RandomState(seed).uniform(low, high, shape).astype("float32")


def image() -> mx.nd.NDArray:
    """(60, 80, 3) uint8."""
    return nd.array(uniform(SIZE[1], SIZE[0], 3, high=255), dtype="uint8")


def boxes() -> np.ndarray:
    """(2, 5): corners and class."""
    return np.array([[5, 5, 40, 40, 0], [20, 10, 70, 50, 1]], "float32")


def joints() -> np.ndarray:
    """(3, 3, 2): coordinates and whether they are visible."""
    found = np.zeros((3, 3, 2), "float32")
    found[:, :2, 0], found[:, :2, 1] = [[10, 10], [30, 20], [50, 40]], 1
    return found


def ids(*values: float) -> mx.nd.NDArray:
    return nd.array([values])


def net_of(name: str, **options: Any) -> Any:
    try:
        net = module("model_zoo").get_model(name, pretrained=False, pretrained_base=False, **options)
    except TypeError:  # it has no base
        net = module("model_zoo").get_model(name, pretrained=False, **options)
    net.initialize(mx.init.Normal(0.01))
    return net


def gradient(loss: Any, data: np.ndarray, *others: Any) -> Any:
    """A loss and its gradient."""
    array: Any = nd.array(data)
    array.attach_grad()
    with autograd.record():
        value = loss(array, *others)
    value = value if isinstance(value, nd.NDArray) else value[0]
    value.backward()
    return value, array.grad


def losses() -> dict[str, Case]:
    """All but the two that need an operator of a changed MXNet (``SoftmaxOHEMOutput``)."""
    loss = module("loss")
    scores, labels = uniform(2, 4, 6, 6), nd.array(uniform(2, 6, 6, high=3.99).astype(int))
    masks, rows = nd.array((uniform(2, 3) > 0.5).astype("float32")), nd.array([1, 3])
    ssd = [nd.array(uniform(2, 8, 3))], [nd.array(uniform(2, 8, 4))], [nd.array([[0, 1, 2, 0, 0, 0, 1, 0]] * 2)]
    yolo = [nd.array(uniform(2, 5, last, seed=last)) for last in (2, 2, 3, 1, 2, 2, 2, 3, 3)]
    siam = nd.array(uniform(2, 5, 17, 17)), nd.array([[1, 7, 9]] * 2), nd.array([[0, 2, 3]] * 2)
    return {
        "FocalLoss": lambda: gradient(loss.FocalLoss(num_class=4), uniform(2, 5, 4), nd.array([[0, 1, 2, 3, 0]] * 2)),
        "HeatmapFocalLoss": lambda: gradient(loss.HeatmapFocalLoss(), uniform(2, 3), nd.array([[1, 0, 0.5]] * 2)),
        "MaskedL1Loss": lambda: gradient(loss.MaskedL1Loss(), uniform(2, 3), nd.ones((2, 3)), masks),
        "SoftmaxCrossEntropyLoss": lambda: gradient(loss.SoftmaxCrossEntropyLoss(), scores, labels),
        "MixSoftmaxCrossEntropyLoss": lambda: gradient(
            loss.MixSoftmaxCrossEntropyLoss(), scores, nd.array(scores), labels
        ),
        "SegmentationMultiLosses": lambda: gradient(
            loss.SegmentationMultiLosses(), scores, nd.array(scores), nd.array(scores), labels
        ),
        "DistillationSoftmaxCrossEntropyLoss": lambda: gradient(
            loss.DistillationSoftmaxCrossEntropyLoss(), uniform(2, 4), rows, nd.array(uniform(2, 4))
        ),
        "SSDMultiBoxLoss": lambda: loss.SSDMultiBoxLoss()(*ssd, [nd.array(uniform(2, 8, 4, seed=4))]),
        "YOLOV3Loss": lambda: loss.YOLOV3Loss()(yolo[3], yolo[0], yolo[1], yolo[2], yolo[3], *yolo[4:7], *yolo[7:]),
        "SiamRPNLoss": lambda: loss.SiamRPNLoss(2)(
            nd.array(uniform(2, 10, 17, 17)),
            nd.array(uniform(2, 20, 17, 17)),
            (siam[0] > 0.5),
            siam[1],
            siam[2],
            nd.array(uniform(2, 4, 5, 17, 17)),
            siam[0],
        ),
    }


def presets() -> dict[str, Case]:
    """Transforms of a sample for training and validation, and of images for a test."""
    get = lambda name: module(f"data.transforms.presets.{name}")  # noqa: E731
    segments = [np.array([[5, 5, 40, 5, 40, 40]], "float32"), np.array([[20, 10, 70, 10, 70, 50]], "float32")]
    sample = {"num_joints": 3, "joint_pairs": JOINTS, "image_size": (64, 64)}
    pose = {**sample, "heatmap_size": (16, 16)}
    label = {"bbox": np.array([5, 5, 40, 40], "float32"), "joints_3d": joints()}
    found: dict[str, Case] = {
        "CenterNet, training": lambda: get("center_net").CenterNetDefaultTrainTransform(128, 128, 2)(image(), boxes()),
        "CenterNet, test": lambda: get("center_net").transform_test(image(), 50),
        "CenterNet, back": lambda: get("center_net").get_post_transform(80, 60, 20, 15),
        "CenterNet": lambda: get("center_net").CenterNetDefaultValTransform(128, 128)(image(), boxes()),
        "SSD, training": lambda: get("ssd").SSDDefaultTrainTransform(64, 64, nd.array(uniform(1, 9, 4)))(
            image(), boxes()
        ),
        "SSD": lambda: get("ssd").SSDDefaultValTransform(64, 64)(image(), boxes()),
        "SSD, test": lambda: get("ssd").transform_test(image(), 50),
        "YOLO, training": lambda: get("yolo").YOLO3DefaultTrainTransform(64, 64)(image(), boxes()),
        "YOLO, targets": lambda: get("yolo").YOLO3DefaultTrainTransform(
            64, 64, net_of("yolo3_darknet53_voc"), mixup=True
        )(image(), np.insert(boxes(), 5, 1, axis=1)),
        "YOLO": lambda: get("yolo").YOLO3DefaultValTransform(64, 64)(image(), boxes()),
        "YOLO, test": lambda: get("yolo").transform_test(image(), 50),
        "Faster R-CNN, training": lambda: get("rcnn").FasterRCNNDefaultTrainTransform(50, 100)(image(), boxes()),
        "Faster R-CNN, targets": lambda: get("rcnn").FasterRCNNDefaultTrainTransform(
            50, 100, net_of("faster_rcnn_resnet50_v1b_voc")
        )(image(), boxes()),
        "Faster R-CNN": lambda: get("rcnn").FasterRCNNDefaultValTransform(50, 100)(image(), boxes()),
        "Faster R-CNN, test": lambda: get("rcnn").transform_test(image(), 50),
        "Mask R-CNN, training": lambda: get("rcnn").MaskRCNNDefaultTrainTransform(50, 100)(
            image(), boxes(), [[one] for one in segments]
        ),
        "Mask R-CNN": lambda: get("rcnn").MaskRCNNDefaultValTransform(50, 100)(image(), boxes(), segments),
        "segmentation, test": lambda: get("segmentation").test_transform(image(), mx.cpu()),
        "ImageNet, test": lambda: get("imagenet").transform_eval(image()),
        "SimplePose, training": lambda: get("simple_pose").SimplePoseDefaultTrainTransform(**pose)(image(), label, "x"),
        "SimplePose": lambda: get("simple_pose").SimplePoseDefaultValTransform(**sample)(image(), label, "x")[0],
        "AlphaPose, training": lambda: get("alpha_pose").AlphaPoseDefaultTrainTransform(
            **pose, rotation_factor=30, scale_factor=(0.8, 1.2)
        )(image(), label, "x")[:3],
        "AlphaPose": lambda: get("alpha_pose").AlphaPoseDefaultValTransform(**sample)(image(), label, "x")[0],
    }
    return found


def transforms() -> dict[str, Case]:
    bbox, images, mask = (module(f"data.transforms.{name}") for name in ("bbox", "image", "mask"))
    pose, video, track = (module(f"data.transforms.{name}") for name in ("pose", "video", "track"))
    experimental = module("data.transforms.experimental")
    rows, other, center = boxes(), module("utils.transforms"), np.array([30.0, 20.0], "float32")
    picture, corner = (
        Image.fromarray(image().asnumpy()),
        module("model_zoo.siamrpn.siamrpn_tracker").Corner(5, 5, 40, 40),
    )
    clips = [image().asnumpy() for _ in range(2)]
    heat, found = nd.array(uniform(2, 3, 16, 12)), [nd.array(uniform(1, 2, *last)) for last in ((1,), (1,), (4,))]
    detected = found[0] * 0, found[1] + 1, nd.array(boxes()[None, :, :4])
    whole = {"scale_ratios": [1.0, 0.8], "mean": MEAN, "std": STD}
    return {
        "bbox.crop": lambda: bbox.crop(rows, (0, 0, 50, 50), False),
        "bbox.flip": lambda: bbox.flip(rows, SIZE, True, True),
        "bbox.resize": lambda: bbox.resize(rows, SIZE, (40, 40)),
        "bbox.translate": lambda: bbox.translate(rows, 3, 4),
        "bbox.affine": lambda: bbox.affine_transform(center, bbox.get_affine_transform(center, 50, 10, (32, 32))),
        "random_crop_with_constraints": lambda: experimental.bbox.random_crop_with_constraints(rows, SIZE),
        "random_color_distort": lambda: experimental.image.random_color_distort(image()),
        "np_random_color_distort": lambda: experimental.image.np_random_color_distort(
            uniform(60, 80, 3), np.random.RandomState(0)
        ),
        "imresize": lambda: [images.imresize(image(), 30, 40, interp) for interp in (1, 10)],
        "resize_long": lambda: images.resize_long(image(), 40),
        "resize_short_within": lambda: images.resize_short_within(image(), 40, 50, mult_base=8),
        "random_pca_lighting": lambda: images.random_pca_lighting(nd.array(uniform(60, 80, 3)), 0.1),
        "random_expand": lambda: [images.random_expand(image(), 3, fill) for fill in (0, [1, 2, 3])],
        "random_flip": lambda: images.random_flip(image(), 0.5, 0.5),
        "resize_contain": lambda: images.resize_contain(image(), (50, 50), fill=[1, 2, 3]),
        "ten_crop": lambda: images.ten_crop(image(), (32, 32)),
        "RandomCrop": lambda: module("data.transforms.block").RandomCrop(32, pad=4)(image()),
        "RandomErasing": lambda: module("data.transforms.block").RandomErasing(1.0)(image()),
        "EfficientNetRandomCrop": lambda: np.asarray(other.EfficientNetRandomCrop(32)(picture)),
        "EfficientNetCenterCrop": lambda: np.asarray(other.EfficientNetCenterCrop(32)(picture)),
        "mask.flip": lambda: mask.flip([rows[:1, :4]], SIZE, True, True),
        "mask.resize": lambda: mask.resize([rows[:1, :4]], SIZE, (40, 40)),
        "mask.to_mask": lambda: mask.to_mask([np.array([[5, 5], [40, 5], [40, 40]], "float32")], SIZE),
        "mask.fill, fast": lambda: mask.fill(uniform(2, 28, 28), rows[:, :4], SIZE),
        "mask.fill": lambda: mask.fill(uniform(2, 28, 28), rows[:, :4], SIZE, fast_fill=False),
        "pose.flip_heatmap": lambda: pose.flip_heatmap(heat, JOINTS, shift=True),
        "pose.flip_joints_3d": lambda: pose.flip_joints_3d(joints(), 80, JOINTS),
        "pose.crop": lambda: pose.crop(image().asnumpy(), center, np.array([0.2, 0.2]), (32, 32)),
        "pose.transform_preds": lambda: pose.transform_preds(
            nd.array(uniform(3, 2)), center, np.array([0.2, 0.2]), (32, 32)
        ),
        "pose.get_max_pred": lambda: pose.get_max_pred(heat),
        "pose.get_final_preds": lambda: pose.get_final_preds(heat, np.array([center] * 2), np.array([[0.2, 0.2]] * 2)),
        "pose.upscale_bbox_fn": lambda: pose.upscale_bbox_fn(rows[0, :4], image().asnumpy()),
        "pose.detector_to_simple_pose": lambda: pose.detector_to_simple_pose(image(), *detected, output_shape=(64, 48)),
        "pose.heatmap_to_coord": lambda: pose.heatmap_to_coord(heat, [rows[0, :4], rows[1, :4]]),
        "pose.detector_to_alpha_pose": lambda: pose.detector_to_alpha_pose(
            image().asnumpy(), *detected, output_shape=(64, 48)
        ),
        "pose.heatmap_to_coord_alpha_pose": lambda: pose.heatmap_to_coord_alpha_pose(heat, nd.array(rows[:, :4])),
        "pose.random_sample_bbox": lambda: pose.random_sample_bbox(
            np.array([5, 5]), np.array([40, 40]), 35, 35, 80, 60
        ),
        "pose.count_visible": lambda: pose.count_visible((5, 5), (40, 40), joints()),
        "pose.cv_cropBox": lambda: pose.cv_cropBox(uniform(3, 60, 80), np.array([5, 5]), np.array([40, 40]), 32, 24),
        "pose.cv_rotate": lambda: pose.cv_rotate(uniform(3, 60, 80), 30, 32, 24),
        "pose.drawGaussian": lambda: pose.drawGaussian(np.zeros((16, 12)), np.array([5.0, 6.0]), 1),
        "VideoGroupTrainTransform": lambda: video.VideoGroupTrainTransform((32, 32), **whole)(clips),
        "VideoGroupTrainTransformV2": lambda: video.VideoGroupTrainTransformV2((32, 32), 40, **whole)(clips),
        "VideoGroupTrainTransformV3": lambda: video.VideoGroupTrainTransformV3((32, 32), 40, 50, MEAN, STD)(clips),
        "VideoGroupTrainTransformV4": lambda: video.VideoGroupTrainTransformV4((32, 32), MEAN, STD)(clips),
        "VideoGroupValTransform": lambda: video.VideoGroupValTransform(32, MEAN, STD)(clips),
        "VideoGroupValTransformV2": lambda: video.VideoGroupValTransformV2((32, 32), 40, MEAN, STD)(clips),
        "VideoThreeCrop": lambda: video.VideoThreeCrop((60, 60))(clips),
        "VideoTenCrop": lambda: video.VideoTenCrop((32, 32))(clips),
        "SiamRPNaugmentation": lambda: track.SiamRPNaugmentation(4, 0.05, 1.0, 1.0, 1.0)(image().asnumpy(), corner, 32),
    }
