"""Worked examples of nets; every layer states its input's size, so a net has its weights before its first batch."""

from .lenet import LeNet
from .pixel_loss import PixelLoss
from .segmentation import SmallFCN
from .text_lstm import TextLSTM

__all__ = ["LeNet", "PixelLoss", "SmallFCN", "TextLSTM"]
