"""Segmentation: a small fully convolutional net, built and called like GluonCV's, and the loss per pixel."""

from typing import Any, Optional

from mxnet.gluon import HybridBlock, nn

VOID = -1  # the class of pixels that do not count: borders, padding


class SmallFCN(HybridBlock):
    """The small net of ``scripts/train_segmentation.py``.

    Four stages halve the image and double the channels; on the way back up, what each stage saw is added to what the
    coarser ones understood; a last transposed convolution draws the classes at the image's own size. Like the nets of
    ``gluoncv.model_zoo`` it takes its kind of batch norm as an argument and returns a tuple.

    Args:
        num_classes: how many kinds of pixels there are, background included.
        channels: of the stages at 1/2, 1/4, 1/8 and 1/16 of the image's size.
        aux: also return the classes as the stage at 1/8 sees them, for an auxiliary loss while training.
        norm_layer: ``gluon.nn.BatchNorm`` or ``gp.nn.SyncBatchNorm``.
        norm_kwargs: its further arguments, such as ``{"kvstore": store}``.

    Input: (N, 3, height, width), both multiples of 16. Output: a tuple of one, or with `aux` two, arrays
    (N, num_classes, height, width), the logits.

    Example:
        >>> from mxnet import nd
        >>> net = SmallFCN(num_classes=11, aux=True)
        >>> net.initialize()
        >>> [output.shape for output in net(nd.zeros((2, 3, 32, 48)))]
        [(2, 11, 32, 48), (2, 11, 32, 48)]
    """

    def __init__(
        self,
        num_classes: int,
        channels: tuple[int, int, int, int] = (24, 48, 96, 192),
        aux: bool = False,
        norm_layer: Any = nn.BatchNorm,
        norm_kwargs: Optional[dict[str, Any]] = None,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)

        def convolution(in_channels, channels, kernel=3, strides=1):
            """Convolution, batch norm and ReLU: the brick that all of it is built from."""
            brick = nn.HybridSequential(prefix="")
            brick.add(
                nn.Conv2D(channels, kernel, strides, kernel // 2, use_bias=False, in_channels=in_channels),
                norm_layer(in_channels=channels, **(norm_kwargs or {})),
                nn.Activation("relu"),
            )
            return brick

        self.aux = aux
        with self.name_scope():
            # `laterals` make what a stage hands to the way back up.
            self.stages, self.laterals, self.merges = (nn.HybridSequential(prefix="") for _ in range(3))
            for before, width in zip((3, *channels), channels):
                stage = nn.HybridSequential(prefix="")
                stage.add(convolution(before, width, strides=2), convolution(width, width))
                if len(self.stages):
                    stage.add(convolution(width, width))
                self.stages.add(stage)
            for finer, coarser in zip(channels[:-1], channels[1:]):
                self.laterals.add(convolution(coarser, finer, kernel=1))
                self.merges.add(convolution(finer, finer))
            self.head = nn.Conv2DTranspose(num_classes, 4, strides=2, padding=1, in_channels=channels[0])
            if aux:
                self.auxiliary = nn.Conv2D(num_classes, 1, in_channels=channels[2])

    def hybrid_forward(self, F, images):
        """See :class:`SmallFCN`."""
        seen, features = images, []
        for stage in self.stages:
            seen = stage(seen)
            features.append(seen)
        for index in reversed(range(len(features) - 1)):
            coarse = F.UpSampling(self.laterals[index](seen), scale=2, sample_type="nearest")
            seen = self.merges[index](features[index] + coarse)
        outputs = [self.head(seen)]
        if self.aux:
            outputs.append(F.UpSampling(self.auxiliary(features[2]), scale=8, sample_type="nearest"))
        return tuple(outputs)


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

    class_axis, ignored_label = 1, VOID  # for the check of labels in a step

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
