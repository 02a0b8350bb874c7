"""COCO's mean average precision of boxes, as pycocotools computes it, over images that come in any order."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..mxnet.compat import mx

# What pycocotools calls its twelve numbers, in its order.
NAMES = ("AP", "AP50", "AP75", "AP small", "AP medium", "AP large",
         "AR 1", "AR 10", "AR 100", "AR small", "AR medium", "AR large")  # fmt: skip
_ROW = 7  # image id, x, y, width, height, score, category: pycocotools' order


class COCOMeanAP(mx.metric.EvalMetric):
    """Average precision over the intersections 0.5, 0.55, ..., 0.95, and COCO's eleven other numbers.

    Only the categories asked for and images that were seen count, so a part of a data set can be measured; an image
    that comes twice, as the last batch of ``gp.sampler.BatchSampler`` repeats some, counts once.
    ``gp.metrics.merge(metric, store)`` makes it whole over the processes.

    Args:
        annotations: the file ``instances_*.json``, or its content.
        category_ids: which category of that file class 0, 1, ... of the predictions is.

    Raises:
        ImportError: pycocotools is not installed.

    Example:
        >>> truth = {"images": [{"id": 7, "width": 50, "height": 40}], "categories": [{"id": 3, "name": "cat"}],
        ...          "annotations": [{"id": 1, "image_id": 7, "category_id": 3, "bbox": [10, 10, 20, 20]}]}
        >>> metric = COCOMeanAP(truth, category_ids=[3])
        >>> metric.update([7], boxes=np.array([[[10, 10, 29, 29]]]), labels=np.array([[0]]), scores=np.array([[0.9]]))
        >>> round(metric.get_name_value()[0][1], 6)
        1.0
    """

    def __init__(self, annotations: str | os.PathLike[str] | Mapping[str, Any], category_ids: Sequence[int]):
        _pycocotools()  # now, rather than after the first epoch
        self._category_ids = np.array(category_ids, np.int64)
        if isinstance(annotations, Mapping):
            self._truth = annotations
        else:
            self._truth = json.loads(Path(annotations).read_text("utf-8"))
        self._known = {image["id"] for image in self._truth["images"]}
        super().__init__("COCOMeanAP")

    def reset(self):
        """Forget all predictions."""
        self.seen = {}  # image id -> (N, _ROW) float64, what is predicted on it

    def update(self, image_ids, boxes, labels, scores):
        """Add the predictions on some images.

        Args:
            image_ids: (B,) their ids in the annotations.
            boxes: (B, N, 4): xmin, ymin, xmax, ymax, in pixels of the image as it is in its file, the last ones
                inclusive, as GluonCV has them.
            labels: (B, N) or (B, N, 1) class numbers; where they are negative there is no prediction.
            scores: (B, N) or (B, N, 1).

        Raises:
            ValueError: an image is not in the annotations, or a label is no class.
        """
        boxes, labels, scores = (np.asarray(array) for array in (boxes, labels, scores))
        for image_id, box, label, score in zip(np.asarray(image_ids).tolist(), boxes, labels, scores):
            if image_id not in self._known:
                raise ValueError(f"COCOMeanAP: image {image_id} is not in the annotations; pass ids that are")
            label, score = label.reshape(-1).astype(int), score.reshape(-1)
            valid = label >= 0
            if (label >= len(self._category_ids)).any():
                raise ValueError(f"COCOMeanAP: label {label.max()} is none of {len(self._category_ids)} classes")
            corner, end = box[valid, :2].astype(np.float64), box[valid, 2:].astype(np.float64)
            rows = [corner, end - corner + 1, score[valid], self._category_ids[label[valid]]]
            self.seen[image_id] = np.column_stack([np.full(valid.sum(), image_id, np.float64), *rows])

    def get(self):
        """The twelve names and values; NaN where there is nothing to find, for instance no small object."""
        values = self._evaluate().stats if self.seen else np.full(len(NAMES), -1.0)
        return list(NAMES), [float(value) if value >= 0 else float("nan") for value in values]

    def _evaluate(self):
        coco, evaluation = _pycocotools()
        with contextlib.redirect_stdout(io.StringIO()):  # it reports each of its steps
            truth, found = coco.COCO(), coco.COCO()
            boxes = [box for box in self._truth["annotations"] if box["image_id"] in self.seen and _is_box(box)]
            # Files made by hand leave these out; pycocotools needs them.
            filled = [{"iscrowd": 0, "area": box["bbox"][2] * box["bbox"][3], **box} for box in boxes]
            numbered = [{**box, "id": number} for number, box in enumerate(filled, 1)]  # 0 would mean no match
            truth.dataset = {**self._truth, "annotations": numbered}
            truth.createIndex()
            rows = np.concatenate([self.seen[image_id] for image_id in sorted(self.seen)])
            if len(rows):
                found = truth.loadRes(rows)
            result = evaluation.COCOeval(truth, found, "bbox")
            result.params.catIds = sorted(self._category_ids.tolist())
            result.evaluate()
            result.accumulate()
            result.summarize()
        return result

    def merge(self, gather_rows):
        """Take in what the other processes have seen; an image that several saw counts as the first saw it."""
        counts = np.array([(image_id, len(rows)) for image_id, rows in self.seen.items()], np.int64).reshape(-1, 2)
        rows = gather_rows(np.concatenate([np.empty((0, _ROW)), *self.seen.values()]))
        start, self.seen = 0, {}
        for image_id, count in gather_rows(counts).tolist():
            self.seen.setdefault(image_id, rows[start : start + count])
            start += count


def _is_box(annotation):
    """Whether it can be measured; the reader of the data set has counted those that cannot."""
    try:
        return np.isfinite(np.array(annotation["bbox"], np.float64)).tolist() == [True] * 4
    except (KeyError, TypeError, ValueError):
        return False


def _pycocotools():
    try:
        from pycocotools import coco, cocoeval
    except ImportError as error:
        raise ImportError(
            "COCOMeanAP: pycocotools is not installed, which computes COCO's average precision; install it (pip "
            "install pycocotools), or measure VOC's with gluoncv.utils.metrics.VOC07MApMetric"
        ) from error
    return coco, cocoeval
