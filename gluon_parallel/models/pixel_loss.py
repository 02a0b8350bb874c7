"""Cross entropy per pixel, over the pixels that count, on any number of devices."""

from mxnet.gluon import HybridBlock

VOID = -1  # the class of pixels that do not count: borders, padding


class PixelLoss(HybridBlock):
    """Softmax cross entropy of the pixels that count, and a share of that of an auxiliary output.

    It returns a sum and a count, not a mean: images have different numbers of pixels that count, and devices and
    processes have different images. :class:`gluon_parallel.DataParallel` divides the sum over all of them by the count
    over all of them, so a step over several devices is one on the whole batch.

    What ``gluoncv.loss.MixSoftmaxCrossEntropyLoss`` computes is the same but for three things: it divides by the pixels
    of each device alone; its value counts void pixels; and `aux_weight` is in its value and not in its gradient, since
    ``SoftmaxOutput`` ignores what its output is multiplied with.

    Args:
        aux_weight: how much the auxiliary output counts; 0 if the net has none.
        background_weight: how much a pixel of class 0 counts in the sum. Where nearly all are background, a net learns
            sooner to tell the others apart if this is less than 1.

    Input: the output (N, num_classes, height, width), with `aux_weight` also the auxiliary one, and the masks
    (N, height, width) with the class of each pixel, or :data:`VOID`. Output: for each of :attr:`parts` a pair
    (sum, count) of arrays of shape (1,).

    Example:
        >>> from mxnet import nd
        >>> [(total, count)] = PixelLoss()(nd.zeros((1, 2, 1, 3)), nd.array([[[0, 1, -1]]]))
        >>> float(total.asscalar() / count.asscalar())  # two pixels count: log(2) each
        0.693147...
    """

    def __init__(self, aux_weight: float = 0.0, background_weight: float = 1.0, **kwargs) -> None:
        super().__init__(**kwargs)
        self.aux_weight, self.background_weight = aux_weight, background_weight
        self.parts = ("pixels", "auxiliary") if aux_weight else ("pixels",)

    def hybrid_forward(self, F, output, *rest):
        """See :class:`PixelLoss`."""
        *auxiliary, masks = rest
        count = F.cast(F.sum(masks != VOID), "float32")
        pairs = [(self._sum(F, output, masks), count)]
        if self.aux_weight:
            pairs.append((self.aux_weight * self._sum(F, auxiliary[0], masks), count))
        return tuple(pairs)

    def _sum(self, F, output, masks):
        # pick() takes class 0 for void; its value is thrown away
        each = -F.pick(F.log_softmax(output, axis=1), masks, axis=1)
        if self.background_weight != 1:
            each = F.where(masks == 0, self.background_weight * each, each)
        return F.sum(F.where(masks == VOID, F.zeros_like(each), each))
