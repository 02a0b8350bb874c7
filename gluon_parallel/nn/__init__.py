"""Layers in which the devices and processes that share a batch meet."""

from .absence import absent
from .convert import convert_sync_batchnorm, revert_sync_batchnorm
from .measured import measured
from .participants import participants
from .symbol import sync_batch_norm_symbol
from .sync_batch_norm import SyncBatchNorm

__all__ = [
    "SyncBatchNorm",
    "absent",
    "convert_sync_batchnorm",
    "measured",
    "participants",
    "revert_sync_batchnorm",
    "sync_batch_norm_symbol",
]
