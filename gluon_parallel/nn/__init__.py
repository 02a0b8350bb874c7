"""Batch norm over all devices and processes that share a batch, and conversions that make nets faster on CPUs."""

from .convert import convert_global_pooling, convert_sync_batchnorm, revert_sync_batchnorm
from .for_cpu import convert_for_cpu, suggest_for_cpu, would_convert
from .pooling import GlobalAvgPool2D
from .sync_batch_norm import SyncBatchNorm, join, measured, participants, sync_batch_norm_symbol

__all__ = [
    "GlobalAvgPool2D",
    "SyncBatchNorm",
    "convert_for_cpu",
    "convert_global_pooling",
    "convert_sync_batchnorm",
    "join",
    "measured",
    "participants",
    "revert_sync_batchnorm",
    "suggest_for_cpu",
    "sync_batch_norm_symbol",
    "would_convert",
]
