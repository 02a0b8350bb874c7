"""What the loss scaler of ``mx.contrib.amp`` keeps to itself."""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any, Callable

num_without_overflow: Callable[[Any], int] = attrgetter("_unskipped")  # updates since the last overflow, or growth
updates_until_growth: Callable[[Any], int] = attrgetter("_scale_seq_len")
largest_scale: Callable[[Any], float] = attrgetter("_max_loss_scale")


def set_loss_scale(scaler: Any, scale: float, num_without_overflow: int) -> None:
    """Set the scale of the next step, and the number of updates that grow it."""
    scaler._loss_scale = scaler._next_loss_scale = scale
    scaler._unskipped = num_without_overflow


def is_amp_initialized() -> bool:
    """Whether ``amp.init`` was called in this process."""
    module: Any = sys.modules.get("mxnet.contrib.amp.amp")
    return module is not None and module._amp_initialized
