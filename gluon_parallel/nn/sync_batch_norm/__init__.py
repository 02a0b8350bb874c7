"""Batch norm over all devices and processes that share a batch."""

from .join import join
from .layer import SyncBatchNorm
from .measured import measured
from .participants import participants
from .symbol import sync_batch_norm_symbol

__all__ = ["SyncBatchNorm", "join", "measured", "participants", "sync_batch_norm_symbol"]
