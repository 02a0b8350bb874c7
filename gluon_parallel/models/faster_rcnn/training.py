"""Training of Faster R-CNN: the forward pass, cut into pieces that take shards of any size, and the losses."""

from gluoncv.model_zoo.rcnn.faster_rcnn.faster_rcnn import FasterRCNN

from ...mxnet.compat import mx
from ...mxnet.compat.array_types import as_tuple
from ...mxnet.engine import make_plain, push, view
from .targets import Chooser

gloss = mx.gluon.loss


class Training(mx.gluon.Block):
    """`net` while it learns: images and boxes in, predictions and their targets out.

    GluonCV's own forward pass is for one number of images per device, fixed when the net is made, and draws proposals
    from the device's random numbers. This one calls the same blocks in the same order, for any number of images and
    with numbers that are handed over. It becomes two graphs when it is hybridized, with the choice of proposals, which
    is NumPy inside the engine, between them.

    Args:
        net: a ``FasterRCNN`` made for one image per device (GluonCV's default) and initialised, which stays what
            predicts.

    Input: as :class:`Inputs`. Output, for B images with S sampled proposals of which at most P are positive:

    - RPN's scores (B, A, 1) before the sigmoid, and boxes (B, A, 4)
    - the head's scores (B, S, classes + 1) before the softmax, and boxes (B, P, classes, 4)
    - the head's targets: class (B, S), with -1 for what does not count, boxes (B, P, classes, 4), their mask alike
    """

    def __init__(self, net: FasterRCNN, **kwargs) -> None:
        super().__init__(**kwargs)
        if net._batch_size != 1:
            raise ValueError(f"Training: per_device_batch_size={net._batch_size}; make the net with 1, it takes any")
        devices = net.class_predictor.weight.list_ctx()  # raises for a net without weights
        net(mx.nd.zeros((1, 3, 128, 128), ctx=devices[0]))  # GluonCV's layers do not state their inputs' sizes
        self.net = net
        self.proposals = _Proposals(net)
        self.head = _Head(net)
        self._choose_one = Chooser(net)
        self._num_pooled = net.num_stages - (net._max_stage > 5)  # a pyramid's top is for the proposals alone

    def forward(self, images, boxes, classes, draws):
        """See :class:`Training`."""
        rpn_score, rpn_box, scores, rois, *features = self.proposals(images)
        with mx.autograd.pause(train_mode=True):
            chosen_rois, indices, class_target, box_target, box_mask = self._choose(rois, scores, boxes, classes, draws)
        class_score, box = self.head(chosen_rois, indices, *features[: self._num_pooled])
        return (
            rpn_score,
            rpn_box,
            class_score.reshape((*class_target.shape, -1)),
            box.reshape(box_target.shape),
            class_target,
            box_target,
            box_mask,
        )

    def _choose(self, rois, scores, boxes, classes, draws):
        """Run the chooser inside the engine, when the proposals are there; nobody waits for it."""
        home = rois.context
        where = home if home.device_type == "cpu" else mx.cpu()
        read = [array.as_in_context(where) for array in (rois, scores, boxes, classes, draws)]
        num, num_sample, num_boxes = len(rois), self._choose_one.num_sample, self._choose_one.num_boxes
        box_shape = (num, num_boxes, self._choose_one.num_class, 4)
        shapes = [(num, num_sample, 5), (num, num_boxes), (num, num_sample), box_shape, box_shape]
        write = [mx.nd.empty(shape, ctx=where) for shape in shapes]
        make_plain(*read)

        def choose():
            results = [view(array) for array in write]
            for image, (rois, scores, boxes, classes, draws) in enumerate(zip(*map(view, read))):
                chosen = self._choose_one(rois, scores[:, 0], boxes, classes[:, 0], draws)
                results[0][image, :, 0], results[0][image, :, 1:] = image, chosen.rois
                results[1][image] = chosen.indices + image * num_sample
                results[2][image], results[3][image], results[4][image] = chosen.classes, chosen.boxes, chosen.mask

        push(choose, read, write, where, name="choose proposals")
        rois, indices, *targets = (array.as_in_context(home) for array in write)
        return rois.reshape((-1, 5)), indices.reshape((-1,)), *targets


class _Proposals(mx.gluon.HybridBlock):
    """Features, and what the RPN says about them."""

    def __init__(self, net: FasterRCNN, **kwargs) -> None:
        super().__init__(**kwargs)
        self.features, self.rpn = net.features, net.rpn

    def hybrid_forward(self, F, images):
        features = as_tuple(self.features(images))
        scores, rois, raw_scores, raw_boxes, _anchors = self.rpn(F.zeros_like(images), *features)
        return [raw_scores, raw_boxes, scores, rois, *features]


class _Head(mx.gluon.HybridBlock):
    """What the net says about proposals: the class of each, and the box of those that are chosen."""

    def __init__(self, net: FasterRCNN, **kwargs) -> None:
        super().__init__(**kwargs)
        self.pieces = mx.gluon.nn.HybridSequential()
        self.pieces.add(*(block for block in (net.top_features, net.box_features) if block is not None))
        self.class_predictor, self.box_predictor = net.class_predictor, net.box_predictor
        self._pools = net.box_features is None
        self._several = net.num_stages > 1
        # bound methods and numbers, for a block that is stored here would be registered twice
        self._pyramid = net._pyramid_roi_feats
        self._roi_size, self._strides, self._mode = net._roi_size, net._strides, net._roi_mode

    def hybrid_forward(self, F, rois, chosen, *features):
        if self._several:
            pooled = self._pyramid(F, features, rois, self._roi_size, self._strides, roi_mode=self._mode)
        elif self._mode == "align":
            pooled = F.contrib.ROIAlign(features[0], rois, self._roi_size, 1.0 / self._strides, sample_ratio=2)
        else:
            pooled = F.ROIPooling(features[0], rois, self._roi_size, 1.0 / self._strides)
        found = self.pieces(pooled)
        if self._pools:
            found = F.contrib.AdaptiveAvgPooling2D(found, output_size=1)
        found = F.flatten(found)
        return self.class_predictor(found), self.box_predictor(F.take(found, chosen))


class Loss:
    """GluonCV's losses: each is a sum over anchors or proposals, divided by how many of them count.

    Its `parts` make :class:`gluon_parallel.DataParallel` divide each sum by its count over the whole batch, on all
    devices of all processes. The mean of the devices' means, which GluonCV's script takes, would be another loss.
    """

    parts = ("rpn_class", "rpn_box", "head_class", "head_box")

    def __init__(self) -> None:
        self._rpn_class = gloss.SigmoidBinaryCrossEntropyLoss(from_sigmoid=False)
        self._rpn_box = gloss.HuberLoss(rho=1 / 9)
        self._head_class = gloss.SoftmaxCrossEntropyLoss()
        self._head_box = gloss.HuberLoss()

    def __call__(
        self, rpn_score, rpn_box, score, box, class_target, box_target, box_mask,
        rpn_class_target, rpn_box_target, rpn_box_mask,
    ):  # fmt: skip
        """The outputs of :class:`Training` and :class:`Labels`; returns a (sum, count) for each of `parts`."""
        with mx.autograd.pause():
            anchors, proposals = rpn_class_target >= 0, class_target >= 0
            num_anchors, num_proposals = anchors.sum(), proposals.sum()
        rpn_class = self._rpn_class(rpn_score.squeeze(axis=-1), rpn_class_target, anchors)
        rpn_boxes = self._rpn_box(rpn_box, rpn_box_target, rpn_box_mask)
        head_class = self._head_class(score, class_target, proposals.expand_dims(-1))
        head_boxes = self._head_box(box, box_target, box_mask)
        return [
            (_sum(rpn_class, rpn_class_target), num_anchors),
            (_sum(rpn_boxes, rpn_box), num_anchors),
            (_sum(head_class, class_target), num_proposals),
            (_sum(head_boxes, box), num_proposals),
        ]


def _sum(means, values):
    """What Gluon's loss has averaged over all but the first axis of `values`, as the sum that it was."""
    return means.sum() * (values.size / values.shape[0])
