"""Batch norm over all devices and processes that share a batch."""

from .join import join as join
from .layer import SyncBatchNorm as SyncBatchNorm
from .measured import measured as measured
from .participants import participants as participants
from .symbol import sync_batch_norm_symbol as sync_batch_norm_symbol
