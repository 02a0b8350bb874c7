"""Calls of GluonCV's layers and nets, by name, on small inputs; `gluoncv_functions.py` runs them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import mxnet as mx
from mxnet import nd

from gluoncv_transforms import Case, boxes, module, net_of, uniform


def output(block, *data):
    block.initialize(mx.init.One())
    return block(*data)


def layers() -> dict[str, Case]:
    nn, coder, sampler, matcher = module("nn"), module("nn.coder"), module("nn.sampler"), module("nn.matcher")
    block, corners = module("nn.block"), nd.array(np.tile(boxes()[:, :4], (2, 1, 1)))
    anchors, ious = nd.array(uniform(1, 9, 4, high=50)), nd.array(uniform(2, 9, 2))
    matches, samples = nd.array([[0, 1, -1] * 3] * 2), nd.array([[1, 1, -1] * 3] * 2)
    refs = corners
    shuffled = sampler.QuotaSampler
    numpy_anchors, numpy_refs = uniform(1, 9, 4, high=50), boxes()[None, :, :4]
    images = nd.array(uniform(2, 3, 32, 32))
    return {
        "BBoxes": lambda: [
            nn.bbox.BBoxCornerToCenter()(corners),
            nn.bbox.NumPyBBoxCornerToCenter()(boxes()[:, :4]),
            nn.bbox.BBoxArea()(corners),
            nn.bbox.BBoxBatchIOU()(corners, corners),
        ],
        "BBoxClipToImage": lambda: nn.bbox.BBoxClipToImage()(corners, nd.zeros((2, 3, 30, 30))),
        "Consensus": lambda: output(block.Consensus(2, 3), nd.array(uniform(6, 2))),
        "DSNT": lambda: output(block.DSNT(8), nd.array(uniform(1, 2, 8, 8))),
        "DUC": lambda: output(block.DUC(8), nd.array(uniform(1, 4, 8, 8))),
        "HardSwish": lambda: output(block.HardSwish(), images),
        "CenterNetDecoder": lambda: coder.CenterNetDecoder(5)(
            nd.array(uniform(1, 2, 8, 8)), nd.array(uniform(1, 2, 8, 8)), nd.array(uniform(1, 2, 8, 8))
        ),
        "MultiClassDecoder": lambda: coder.MultiClassDecoder()(nd.array(uniform(2, 9, 4))),
        "MultiPerClassDecoder": lambda: coder.MultiPerClassDecoder(4)(nd.array(uniform(2, 9, 4))),
        "MultiClassEncoder": lambda: coder.MultiClassEncoder()(samples, matches, nd.array([[0, 1]] * 2)),
        "NormalizedBoxCenterDecoder": lambda: coder.NormalizedBoxCenterDecoder()(nd.array(uniform(2, 9, 4)), anchors),
        "NormalizedBoxCenterEncoder": lambda: coder.NormalizedBoxCenterEncoder()(
            samples, matches, nd.array(uniform(2, 9, 4, high=50)), refs
        ),
        "NumPyNormalizedBoxCenterEncoder": lambda: coder.NumPyNormalizedBoxCenterEncoder()(
            samples.asnumpy()[:1], matches.asnumpy()[:1].astype(int), numpy_anchors, numpy_refs
        ),
        "SigmoidClassEncoder": lambda: coder.SigmoidClassEncoder()(samples),
        "matchers": lambda: [
            matcher.MaximumMatcher(0.5)(ious),
            matcher.BipartiteMatcher()(ious),
            matcher.CompositeMatcher([matcher.BipartiteMatcher(), matcher.MaximumMatcher(0.5)])(ious),
        ],
        "QuotaSampler": lambda: shuffled(4, 0.6, 0.4)(matches, ious),
        "QuotaSamplerOp": lambda: nd.Custom(matches, ious, op_type="quota_sampler", num_sample=4, pos_thresh=0.6),
        "OHEMSampler": lambda: sampler.OHEMSampler(2)(matches, nd.array(uniform(2, 9, 3)), ious),
        "GroupNorm": lambda: output(nn.gn.GroupNorm(2, 4), nd.array(uniform(2, 4, 3, 3))),
        "DropBlock": lambda: output(nn.dropblock.DropBlock(0.5, 3, 3, 32, 32), images),
        "SplitAttentionConv": lambda: output(
            nn.splat.SplitAttentionConv(64, 3, in_channels=4, padding=(1, 1)), nd.array(uniform(2, 4, 8, 8))
        ),
        "RPN's anchors": lambda: output(
            module("model_zoo.rcnn.rpn.anchor").RPNAnchorGenerator(16, 16, (0.5, 1, 2), (8, 16), (8, 8)),
            nd.zeros((1, 3, 4, 4)),
        ),
        "freeze_bn, set_lr_mult": lambda: [
            module("utils").freeze_bn(net_of("cifar_resnet20_v1")) or 0,
            module("utils").set_lr_mult(net_of("cifar_resnet20_v1"), ".*weight", 0.1) or 0,
        ],
    }


NETS = {  # of each family, with the size of an image, or the shape of a batch
    "alexnet": 224,
    "cifar_resnet20_v1": 32,
    "cifar_wideresnet16_10": 32,
    "densenet121": 224,
    "dla34": 64,
    "googlenet": 224,
    "hrnet_w18_small_v1_c": 64,
    "inceptionv3": 299,
    "mobilenet0.25": 64,
    "mobilenetv3_small": 64,
    "residualattentionnet56": 224,
    "resnest14": 64,
    "resnet18_v1b": 64,
    "resnext50_32x4d": 64,
    "se_resnet18_v1": 64,
    "shufflenet_v1": 224,
    "squeezenet1.1": 224,
    "vgg11": 64,
    "xception": 96,
    "nasnet_4_1056": 64,
    "fcn_resnet50_voc": (1, 3, 480, 480),
    "deeplab_resnet50_ade": (1, 3, 480, 480),
    "psp_resnet50_ade": (1, 3, 480, 480),
    "icnet_resnet50_citys": (1, 3, 480, 480),
    "fastscnn_citys": (1, 3, 1024, 1024),
    "danet_resnet50_citys": (1, 3, 480, 480),
    "ssd_300_vgg16_atrous_voc": 300,
    "ssd_512_resnet50_v1_voc": 512,
    "yolo3_darknet53_voc": 64,
    "yolo3_mobilenet1.0_voc": 64,
    "center_net_resnet18_v1b_voc": 64,
    "faster_rcnn_resnet50_v1b_voc": 128,
    "faster_rcnn_fpn_resnet50_v1b_coco": 128,
    "mask_rcnn_resnet18_v1b_coco": 256,
    "mask_rcnn_fpn_resnet50_v1b_coco": 128,
    "simple_pose_resnet18_v1b": 64,
    "alpha_pose_resnet101_v1b_coco": 64,
    "mobile_pose_resnet18_v1b": 64,
    "c3d_kinetics400": (1, 3, 16, 112, 112),
    "i3d_resnet50_v1_kinetics400": (1, 3, 8, 64, 64),
    "slowfast_4x16_resnet50_kinetics400": (1, 3, 36, 64, 64),
    "r2plus1d_resnet18_kinetics400": (1, 3, 8, 64, 64),
    "monodepth2_resnet18_kitti_mono_stereo_640x192": (1, 3, 192, 640),
    "siamrpn_alexnet_v2_otb15": None,
}


def nets() -> dict[str, Case]:
    """A forward pass of a net of each family, of which only shapes are compared: initial weights are random."""

    def forward(name: str, shape: tuple[int, ...]):
        found = net_of(name)(nd.array(uniform(*shape)))
        return [one.shape for one in (found if isinstance(found, (tuple, list)) else [found]) if hasattr(one, "shape")]

    def siam():
        net = net_of("siamrpn_alexnet_v2_otb15")
        return [one.shape for one in net(nd.array(uniform(1, 3, 127, 127)), nd.array(uniform(1, 3, 287, 287)))]

    shapes: dict[str, Any] = {
        name: (1, 3, size, size) if isinstance(size, int) else size for name, size in NETS.items()
    }
    calls: dict[str, Case] = {}
    for name, shape in shapes.items():
        calls[f"net {name}"] = siam if shape is None else functools.partial(forward, name, shape)
    return calls
