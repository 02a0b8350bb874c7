"""Worked examples of nets; every layer states its input's size, so a net has its weights before its first batch."""

from .lenet import LeNet
from .text_lstm import TextLSTM

__all__ = ["LeNet", "TextLSTM"]
