"""Example nets; every layer states its input's size, so the weights exist before the first batch."""

from typing import Any

from ..compat.deferred import Deferred
from .lenet import LeNet as LeNet
from .pixel_loss import PixelLoss as PixelLoss
from .pretrained import published_weights as published_weights
from .segmentation import SmallFCN as SmallFCN
from .text_lstm import TextLSTM as TextLSTM

faster_rcnn: Any = Deferred(f"{__name__}.faster_rcnn")  # imports GluonCV, which is large, and not everybody has it
