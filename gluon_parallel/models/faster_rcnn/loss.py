"""The four losses of Faster R-CNN, as sums and counts that add up over devices and processes."""

from ...compat import mx

gloss = mx.gluon.loss


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
