"""LeNet: two convolutions with pooling and two dense layers."""

from mxnet.gluon import nn


class LeNet(nn.HybridSequential):
    """The net of ``scripts/train_lenet.py``, with ReLU and average pooling.

    Its parameters are those of ``scripts/train_lenet_scratch.py``: convolutions of 20 and 50 channels with 3 x 3 and
    5 x 5 kernels, and dense layers of 128 and `num_classes` units.

    Args:
        num_classes: how many kinds of images there are.
        in_channels: 1 for grey images, 3 for coloured ones.
        image_size: (height, width) of the images in pixels, at least 14 x 14.

    Input: (N, in_channels, height, width). Output: (N, num_classes), the logits.

    Example:
        >>> from mxnet import nd
        >>> net = LeNet(num_classes=10, in_channels=3, image_size=(32, 32))
        >>> net.initialize()
        >>> net(nd.zeros((2, 3, 32, 32))).shape
        (2, 10)
    """

    def __init__(
        self, num_classes: int = 10, in_channels: int = 1, image_size: tuple[int, int] = (28, 28), **kwargs
    ) -> None:
        super().__init__(**kwargs)
        height, width = (((side - 2) // 2 - 4) // 2 for side in image_size)
        if height < 1 or width < 1:
            raise ValueError(f"LeNet: image_size is {image_size}, wanted at least (14, 14)")
        with self.name_scope():
            self.add(
                nn.Conv2D(20, kernel_size=3, in_channels=in_channels, activation="relu"),  # 28 -> 26
                nn.AvgPool2D(pool_size=2, strides=2),  # -> 13
                nn.Conv2D(50, kernel_size=5, in_channels=20, activation="relu"),  # -> 9
                nn.AvgPool2D(pool_size=2, strides=2),  # -> 4
                nn.Dense(128, in_units=50 * height * width, activation="relu"),  # 50 * 4 * 4 = 800
                nn.Dense(num_classes, in_units=128),
            )
