"""Layers in which the devices and processes that share a batch meet, and what makes nets on CPUs faster."""

from .convert import convert_global_pooling, convert_sync_batchnorm, revert_sync_batchnorm
from .for_cpu import convert_for_cpu, suggest_for_cpu, would_convert
from .pooling import GlobalAvgPool2D
from .sync_batch_norm import SyncBatchNorm, absent, measured, participants, sync_batch_norm_symbol

__all__ = [
    "GlobalAvgPool2D",
    "SyncBatchNorm",
    "absent",
    "convert_for_cpu",
    "convert_global_pooling",
    "convert_sync_batchnorm",
    "measured",
    "participants",
    "revert_sync_batchnorm",
    "suggest_for_cpu",
    "sync_batch_norm_symbol",
    "would_convert",
]
