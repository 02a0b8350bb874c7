"""Example nets; every layer states its input's size, so the weights exist before the first batch."""

import importlib
from typing import Any

from .lenet import LeNet as LeNet
from .pretrained import published_weights as published_weights
from .segmentation import PixelLoss as PixelLoss
from .segmentation import SmallFCN as SmallFCN
from .text_lstm import TextLSTM as TextLSTM


def __getattr__(name: str) -> Any:  # imports GluonCV when it is asked for: it is large, and not everybody has it
    if name != "faster_rcnn":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gluon_parallel"):
            raise
        raise ModuleNotFoundError(
            f"gp.models.{name} needs GluonCV and what it imports ({error}): pip install 'gluon-parallel[gluoncv]' and "
            "pip install --no-deps 'gluoncv==0.10.5.post0'",
            name=error.name,
        ) from error
