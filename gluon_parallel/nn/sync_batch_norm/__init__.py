"""Batch norm over all devices and processes that share a batch."""

from .join import absent
from .layer import SyncBatchNorm
from .measured import measured
from .participants import participants
from .symbol import sync_batch_norm_symbol

__all__ = ["SyncBatchNorm", "absent", "measured", "participants", "sync_batch_norm_symbol"]
