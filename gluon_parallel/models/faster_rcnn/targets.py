"""Training batches of Faster R-CNN, targets of its anchors and of its proposals, by each image's own random numbers.

Faster R-CNN draws twice: the anchors that the RPN learns from, and the proposals that the box head learns from. Here
both draws are made from numbers that belong to the sample, (seed, epoch, number of the image), and travel with it. So
neither the device nor the process on which an image lands, nor its neighbours in the batch, change what is drawn.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gluoncv.model_zoo.rcnn.faster_rcnn.faster_rcnn import FasterRCNN
from gluoncv.model_zoo.rcnn.rpn.rpn_target import RPNTargetGenerator
from gluoncv.nn.coder import NumPyNormalizedBoxCenterEncoder
from gluoncv.utils import bbox_iou

from ...errors import DatasetCorrupt
from ...mxnet.compat import mx
from ...mxnet.compat.array_types import as_tuple

_ALL = 2**31 - 1  # GluonCV's sampler then labels every anchor and draws none


class Inputs(NamedTuple):
    """What :class:`Training` takes."""

    images: np.ndarray  # (B, 3, H, W) float32
    boxes: np.ndarray  # (B, M, 4) float32: xmin, ymin, xmax, ymax; padding is -1
    classes: np.ndarray  # (B, M, 1) float32; padding is -1
    draws: np.ndarray  # (B, proposals + M) float32 from 0 to 1


class Labels(NamedTuple):
    """What :class:`Loss` takes beside the net's outputs: targets for each of A anchors."""

    rpn_class: np.ndarray  # (B, A) float32: 1 object, 0 background, -1 does not count
    rpn_box: np.ndarray  # (B, A, 4) float32
    rpn_box_mask: np.ndarray  # (B, A, 4) float32: 1 where rpn_class is


class Targets:
    """Makes training batches of images with boxes; `mark` and `collate` make what a loader of samples wants.

    Args:
        net: a ``FasterRCNN``, whose anchors and numbers of proposals are read.
        max_boxes: rows of every batch's boxes; what the net was made with.
        as_input: function of a list of (H, W, 3) uint8 images, perhaps of several sizes, that returns (B, 3, H, W).
        num_sample, pos_iou, neg_iou: of the anchors that the RPN learns from: how many per image, of which at most half
            are positive; which overlap an object (and which overlap none) enough. GluonCV's numbers.

    Example:
        >>> from .net import small
        >>> net = small(["cat"])
        >>> net.initialize()
        >>> targets = Targets(net, max_boxes=16, as_input=lambda images: np.zeros((len(images), 3, 64, 64)))
        >>> image, label = np.zeros((64, 64, 3), np.uint8), np.array([[8, 4, 29, 43, 0]])
        >>> batch = targets.collate([(image, label, np.random.RandomState(0))])
        >>> [array.shape for array in batch[:4]]  # as Inputs
        [(1, 3, 64, 64), (1, 16, 4), (1, 16, 1), (1, 116)]
        >>> [array.shape for array in batch[4:]]  # as Labels: 8 x 8 places of 6 anchors
        [(1, 384), (1, 384, 4), (1, 384, 4)]
    """

    def __init__(
        self,
        net: Any,
        max_boxes: int,
        as_input: Callable[[Sequence[np.ndarray]], np.ndarray],
        num_sample: int = 256,
        pos_iou: float = 0.7,
        neg_iou: float = 0.3,
    ) -> None:
        self.max_boxes, self.num_sample, self.max_positive = max_boxes, num_sample, round(num_sample / 2)
        self._as_input = as_input
        self._num_draws = net.sampler._num_proposal + max_boxes
        self._generator = RPNTargetGenerator(_ALL, pos_iou, neg_iou, pos_ratio=1)
        self.anchors = anchors_of(net)

    @staticmethod
    def mark(transform: Callable[..., tuple]) -> Callable[..., tuple]:
        """What `transform` does with (image, label, random), and the sample's random numbers stay with it."""
        return lambda image, label, random: (*transform(image, label, random), random)

    def collate(self, samples: Sequence[tuple]) -> tuple[np.ndarray, ...]:
        """The samples as :class:`Inputs` and :class:`Labels` in a tuple; DatasetCorrupt: one has too many boxes."""
        images, labels, randoms = zip(*samples)
        batch = self._as_input(images)
        boxes = np.full((len(labels), self.max_boxes, 5), -1, np.float32)
        for rows, label in zip(boxes, labels):
            if len(label) > self.max_boxes:
                raise DatasetCorrupt(
                    f"an image has {len(label)} boxes, more than max_boxes: {self.max_boxes}; raise max_boxes"
                )
            rows[: len(label)] = label[:, :5]
        anchors = self.anchors(*batch.shape[2:])
        targets = [
            self.targets(label[:, :4].astype(np.float32), anchors, image.shape[:2], random)
            for image, label, random in zip(images, labels, randoms)
        ]
        draws = np.stack([random.random_sample(self._num_draws).astype(np.float32) for random in randoms])
        inputs = Inputs(batch, boxes[..., :4], boxes[..., 4:], draws)
        return (*inputs, *Labels(*(np.stack(parts).astype(np.float32) for parts in zip(*targets))))

    def targets(self, boxes, anchors, size, random) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """GluonCV's targets of the RPN for one image with `boxes` (N, 4) and `anchors` (A, 4), drawn with `random`.

        Anchors beyond `size` (height, width) do not count. Returns class (A,), box and mask (A, 4), as :class:`Labels`.
        """
        boxes = boxes if len(boxes) else np.full((1, 4), -1, np.float32)  # overlaps nothing: all is background
        overlaps = bbox_iou(anchors, boxes)
        outside = (anchors[:, :2] < 0).any(1) | (anchors[:, 2] >= size[1]) | (anchors[:, 3] >= size[0])
        overlaps[outside] = -1
        chosen, matches = self._generator._sampler(overlaps)
        chosen[outside] = 0
        positive = _draw(chosen, 1, self.max_positive, random)
        _draw(chosen, -1, self.num_sample - positive, random)
        classes, _ = self._generator._cls_encoder(chosen)
        with np.errstate(divide="ignore", invalid="ignore"):  # padding has no area; the encoder leaves it out
            box, mask = self._generator._box_encoder(chosen[None], matches[None], anchors[None], boxes[None])
        return classes, box[0], mask[0]


def _draw(chosen: np.ndarray, kind: int, most: int, random: np.random.RandomState) -> int:
    """Leave at most so many of a kind in `chosen`, drawn without preference; returns how many there are now."""
    indices = np.flatnonzero(chosen == kind)
    if len(indices) > most:
        chosen[random.permutation(indices)[most:]] = 0
    return min(len(indices), most)


def anchors_of(net: Any) -> Callable[[int, int], np.ndarray]:
    """A function (height, width) -> (A, 4), the net's anchors for images of that size, in the order of its outputs.

    The anchors are read here, so that the function does not wait while the net is busy.
    """
    generators = net.rpn.anchor_generator
    levels = list(generators) if isinstance(generators, mx.gluon.nn.HybridSequential) else [generators]
    grids = [level.anchors.value.asnumpy()[0, 0] for level in levels]  # (rows, columns, 4 x anchors per place)
    features = as_tuple(net.features(mx.sym.var("data")))

    @functools.cache
    def anchors(height: int, width: int) -> np.ndarray:
        shapes = [feature.infer_shape(data=(1, 3, height, width))[1][0] for feature in features]
        return np.concatenate([grid[: shape[2], : shape[3]].reshape(-1, 4) for grid, shape in zip(grids, shapes)])

    return anchors


_IGNORE, _NEGATIVE, _POSITIVE = 0, -1, 1


class Chosen(NamedTuple):
    """Of one image: S sampled proposals, of which the first P of an order by `indices` may be positive."""

    rois: np.ndarray  # (S, 4)
    classes: np.ndarray  # (S,) 0 background, 1 + class, -1 does not count
    indices: np.ndarray  # (P,) which of the S have the boxes below
    boxes: np.ndarray  # (P, C, 4) encoded
    mask: np.ndarray  # (P, C, 4) 1 where a box counts: the proposal is positive, and the class is its own


class Chooser:
    """Samples proposals for the box head, and their targets, by given random numbers and a ``FasterRCNN``'s options.

    This is what GluonCV's ``RCNNTargetSampler`` and ``RCNNTargetGenerator`` compute for one image with some forty
    operators; here it is NumPy, in one function of the engine per image.
    (Among equal values, MXNet's sort may choose other ones than NumPy's stable sort does here.)
    """

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
        # ... then negatives, and positives where there are too few, from behind as many shuffled indices.
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
        indices = _by(kinds == _POSITIVE, (True, False))[: self.num_boxes]
        same = own[indices, None] == np.arange(self.num_class)  # (P, C)
        repeated = np.broadcast_to(encoded[0][indices][:, None], (len(indices), self.num_class, 4))
        return Chosen(rois, target, indices, repeated, mask[0][indices][:, None] * same[..., None])


def _by(kinds, order):
    """The indices of `kinds`, those of the first kind in `order` before those of the second; otherwise as they are."""
    return np.concatenate([np.flatnonzero(kinds == kind) for kind in order])
