"""Calls of GluonCV's metrics, loaders and drawings, by name; `gluoncv_functions.py` runs them."""

from __future__ import annotations

import os
import tempfile

import numpy as np

import mxnet as mx
from mxnet import nd

from gluoncv_transforms import Case, boxes, ids, image, module, uniform


def metrics() -> dict[str, Case]:
    rcnn, voc, tracking, segmentation, heatmap, accuracy = (
        module(f"utils.metrics.{name}")
        for name in ("rcnn", "voc_detection", "tracking", "segmentation", "heatmap_accuracy", "accuracy")
    )
    one_hot = nd.array((uniform(2, 3) > 0.5).astype("float32"))

    def scored(metric, *arguments):
        metric.update(*arguments)
        return metric.get()[1]

    def detections(kind):
        rows, metric = nd.array(boxes()[None, :, :4]), kind(0.5, ["a", "b"])
        metric.update([rows], [ids(0, 1)], [ids(0.9, 0.8)], [rows], [ids(0, 1)], [ids(0, 0)])
        metric.update([rows], [ids(0, 1)], [ids(0.9, 0.8)], [rows + 9], [ids(0, 1)], None)
        return metric.get()[1]

    line = {"gt": [boxes()[0, :4]] * 3, "found": [boxes()[1, :4]] * 3}
    return {
        "VOCMApMetric": lambda: detections(voc.VOCMApMetric),
        "VOC07MApMetric": lambda: detections(voc.VOC07MApMetric),
        "SegmentationMetric": lambda: scored(
            segmentation.SegmentationMetric(4), nd.array([[[0, 1], [2, 3]]]), nd.array(uniform(1, 4, 2, 2))
        ),
        "pixelAccuracy": lambda: segmentation.pixelAccuracy(np.array([[0, 1]]), np.array([[0, 0]])),
        "intersectionAndUnion": lambda: segmentation.intersectionAndUnion(np.array([[0, 1]]), np.array([[0, 0]]), 2),
        "HeatmapAccuracy": lambda: scored(
            heatmap.HeatmapAccuracy(), [nd.array(uniform(2, 3, 16, 12))], [nd.array(uniform(2, 3, 16, 12, seed=5))]
        ),
        "Accuracy": lambda: scored(accuracy.Accuracy(), [nd.array([0, 1])], [nd.array(uniform(2, 3))]),
        "RPNAccMetric": lambda: scored(rcnn.RPNAccMetric(), [one_hot, one_hot], [one_hot]),
        "RPNL1LossMetric": lambda: scored(rcnn.RPNL1LossMetric(), [one_hot, one_hot], [one_hot]),
        "RCNNAccMetric": lambda: scored(rcnn.RCNNAccMetric(), [nd.array([[0, 1]])], [nd.array(uniform(1, 2, 3))]),
        "RCNNL1LossMetric": lambda: scored(rcnn.RCNNL1LossMetric(), [one_hot, one_hot], [one_hot]),
        "MaskAccMetric": lambda: scored(rcnn.MaskAccMetric(), [one_hot, one_hot], [one_hot]),
        "MaskFGAccMetric": lambda: scored(rcnn.MaskFGAccMetric(), [one_hot, one_hot], [one_hot]),
        "tracking": lambda: [
            tracking.success_overlap(np.array(line["gt"]), np.array(line["found"]), 3),
            tracking.success_error(np.array(line["gt"])[:, :2], np.array(line["found"])[:, :2], np.arange(0, 51, 1), 3),
        ],
        "bbox_iou": lambda: module("utils.bbox").bbox_iou(boxes()[:, :4], boxes()[:, :4]),
        "bbox_xywh_to_xyxy": lambda: [
            getattr(module("utils.bbox"), name)(form)
            for name in ("bbox_xywh_to_xyxy", "bbox_xyxy_to_xywh")
            for form in (boxes()[:, :4], tuple(boxes()[0, :4]))
        ],
        "bbox_clip_xyxy": lambda: module("utils.bbox").bbox_clip_xyxy(boxes()[:, :4], 30, 30),
    }


def data() -> dict[str, Case]:
    """Loaders, samplers, drawings and what else is used in a script."""
    get, viz, tools = module("data"), module("utils.viz"), module("utils")
    samples = [(np.zeros(3, "float32"), boxes()[:rows]) for rows in (2, 1, 2, 2)]
    coded = [(image(), boxes()[:rows]) for rows in (2, 1)]
    batchify = get.batchify

    def first(workers):
        loader = get.DetectionDataLoader(samples, 2, num_workers=workers)
        return next(iter(loader))

    def drawn():
        import matplotlib.pyplot as plt

        axes = [viz.plot_image(image()), viz.plot_bbox(image(), boxes()[:, :4], np.ones(2), boxes()[:, 4])]
        found = [len(one.patches) for one in axes]
        plt.close("all")
        return found

    def recorded():
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "data")
            writer = mx.recordio.MXIndexedRecordIO(f"{path}.idx", f"{path}.rec", "w")
            for number in range(2):
                label = np.array([4, 5, 80, 60, 0, 0.1, 0.1, 0.5, 0.5], "float32")
                header = mx.recordio.IRHeader(0, label, number, 0)
                writer.write_idx(number, mx.recordio.pack_img(header, image().asnumpy(), quality=9, img_fmt=".png"))
            writer.close()
            return get.RecordFileDetection(f"{path}.rec")[1]

    scheduler = tools.LRSequential(
        [
            tools.LRScheduler("linear", base_lr=0, target_lr=1, niters=3),
            tools.LRScheduler("cosine", base_lr=1, niters=5),
        ]
    )
    return {
        "DetectionDataLoader": lambda: first(0),
        "DetectionDataLoader, workers": lambda: first(2),
        "batchify": lambda: [
            batchify.Pad(pad_val=-1)([one[1] for one in samples]),
            batchify.Append()([one[1] for one in samples]),
            batchify.Tuple(batchify.Stack(), batchify.Pad(ret_length=True))(samples),
        ],
        "MixupDetection": lambda: _mixed(get, coded),
        "RecordFileDetection": recorded,
        "samplers": lambda: [
            [*module("data.sampler").SplitSampler(7, 2, 0)],
            [*module("data.sampler").SplitSortedBucketSampler([3, 1, 2, 5], 2, num_parts=1, shuffle=True)],
        ],
        "LRScheduler": lambda: [scheduler(step) for step in range(8)],
        "drawings": drawn,
        "cv_plot_bbox": lambda: viz.cv_plot_bbox(
            image(), boxes()[:, :4], np.ones(2), boxes()[:, 4], colors={0: (9, 9, 9), 1: (5, 5, 5)}
        ),
        "expand_mask": lambda: viz.expand_mask(uniform(2, 28, 28), boxes()[:, :4], (80, 60), np.ones(2)),
        "plot_mask": lambda: viz.plot_mask(image().asnumpy(), np.ones((1, 60, 80), "uint8")).shape,
        "get_color_pallete": lambda: np.asarray(viz.get_color_pallete(np.ones((4, 4)))),
        "cv_merge_two_images": lambda: viz.cv_merge_two_images(image(), image()),
        "crop_like_SiamFC": lambda: module("utils.data.tracking").crop_like_SiamFC(image().asnumpy(), [5, 5, 40, 40]),
        "TrainingHistory": lambda: tools.TrainingHistory(["a"]).update([0.5]),
        "kitti": lambda: module("data.kitti.kitti_utils").sub2ind((4, 5), np.array([1]), np.array([2])),
    }


def _mixed(get, samples):
    dataset = get.MixupDetection(samples)
    dataset.set_mixup(np.random.beta, 1.5, 1.5)
    return dataset[0]
