"""Layers in which the devices and processes that share a batch meet, and what makes nets on CPUs faster."""

from .absence import absent
from .convert import convert_global_pooling, convert_sync_batchnorm, revert_sync_batchnorm
from .measured import measured
from .participants import participants
from .pooling import GlobalAvgPool2D
from .symbol import sync_batch_norm_symbol
from .sync_batch_norm import SyncBatchNorm

__all__ = [
    "GlobalAvgPool2D",
    "SyncBatchNorm",
    "absent",
    "convert_global_pooling",
    "convert_sync_batchnorm",
    "measured",
    "participants",
    "revert_sync_batchnorm",
    "sync_batch_norm_symbol",
]
