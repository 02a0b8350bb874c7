"""Sampling of proposals for the box head, and their targets, by given random numbers.

This is what GluonCV's ``RCNNTargetSampler`` and ``RCNNTargetGenerator`` compute for one image with some forty
operators; here it is NumPy, in one function of the engine per image.
(Among equal values, MXNet's sort may choose other ones than NumPy's stable sort does here.)
"""

from typing import NamedTuple

import numpy as np

from gluoncv.model_zoo.rcnn.faster_rcnn.faster_rcnn import FasterRCNN
from gluoncv.nn.coder import NumPyNormalizedBoxCenterEncoder
from gluoncv.utils import bbox_iou

from ...compat import mx

_IGNORE, _NEGATIVE, _POSITIVE = 0, -1, 1


class Chosen(NamedTuple):
    """Of one image: S sampled proposals, of which the first P of an order by `places` may be positive."""

    rois: np.ndarray  # (S, 4)
    classes: np.ndarray  # (S,) 0 background, 1 + class, -1 does not count
    places: np.ndarray  # (P,) which of the S have the boxes below
    boxes: np.ndarray  # (P, C, 4) encoded
    mask: np.ndarray  # (P, C, 4) 1 where a box counts: the proposal is positive, and the class is its own


class Chooser:
    """GluonCV's rule with the numbers of a ``FasterRCNN``."""

    def __init__(self, net: FasterRCNN) -> None:
        generator = net._target_generator  # what makes one; net.target_generator would give the net more parameters
        encoder = (generator if isinstance(generator, mx.gluon.Block) else generator())._box_encoder
        sampler = net.sampler
        self.num_sample, self.num_class = sampler._num_sample, net.num_class
        self.num_boxes = encoder._max_pos  # the P of Chosen
        self._max_positive, self._iou = sampler._max_pos, sampler._pos_iou_thresh
        self._encode = NumPyNormalizedBoxCenterEncoder(stds=encoder.class_agnostic_encoder._stds)

    def __call__(self, rois, scores, boxes, classes, draws) -> Chosen:
        """Choose for one image, by (N + M or more,) random numbers from 0 to 1.

        `rois` are (N, 4) proposals, whose `scores` are below 0 if they are none; `boxes` (M, 4) and `classes` (M,) are
        the truth, padded with -1.
        """
        rois = np.concatenate([rois, boxes])  # the truth is among the proposals
        valid = np.concatenate([scores, np.sign(boxes.sum(axis=1) + 1)]) >= 0
        with np.errstate(divide="ignore", invalid="ignore"):
            overlaps = np.nan_to_num(bbox_iou(rois, boxes))  # 0 where nothing has an area
        matches = overlaps.argmax(axis=1)
        kinds = np.where(overlaps.max(axis=1) >= self._iou, _POSITIVE, np.where(valid, _NEGATIVE, _IGNORE))
        shuffled = np.argsort(draws[: len(rois)], kind="stable")
        # Positives first, as many as may be, and negatives where there are too few ...
        first = _by(kinds[shuffled], (_POSITIVE, _NEGATIVE, _IGNORE))[: self._max_positive]
        # ... then negatives, and positives where there are too few, from behind as many shuffled places.
        rest = shuffled[self._max_positive :]
        second = _by(kinds[rest], (_NEGATIVE, _POSITIVE, _IGNORE))[: self.num_sample - self._max_positive]
        chosen = np.concatenate([shuffled[first], rest[second]])
        left, top, right, bottom = rois[chosen].T
        chosen = chosen[np.argsort((right - left) * (bottom - top), kind="stable")]

        rois, kinds, matches = rois[chosen], kinds[chosen], matches[chosen]
        own = classes[matches]
        target = np.where(kinds == _POSITIVE, own + 1, np.where(kinds == _NEGATIVE, 0, -1))
        with np.errstate(divide="ignore", invalid="ignore"):  # padding has no area; the encoder leaves it out
            encoded, mask = self._encode(kinds[None], matches[None], rois[None], boxes[None])
        places = _by(kinds == _POSITIVE, (True, False))[: self.num_boxes]
        same = own[places, None] == np.arange(self.num_class)  # (P, C)
        repeated = np.broadcast_to(encoded[0][places][:, None], (len(places), self.num_class, 4))
        return Chosen(rois, target, places, repeated, mask[0][places][:, None] * same[..., None])


def _by(kinds, order):
    """The places of `kinds`, those of the first kind in `order` before those of the second; otherwise as they are."""
    return np.concatenate([np.flatnonzero(kinds == kind) for kind in order])
