"""Batch norm over all devices and processes that share a batch, and conversions that make nets faster on CPUs."""

from .convert import GlobalAvgPool2D as GlobalAvgPool2D
from .convert import convert_global_pooling as convert_global_pooling
from .convert import convert_sync_batchnorm as convert_sync_batchnorm
from .convert import replace_contrib as replace_contrib
from .convert import revert_sync_batchnorm as revert_sync_batchnorm
from .for_cpu import convert_by_default as convert_by_default
from .for_cpu import convert_for_cpu as convert_for_cpu
from .for_cpu import say_what_was_converted as say_what_was_converted
from .for_cpu import would_convert as would_convert
from .recompute import recompute as recompute
from .sync_batch_norm.graph import sync_batch_norm_symbol as sync_batch_norm_symbol
from .sync_batch_norm.layer import SyncBatchNorm as SyncBatchNorm
from .sync_batch_norm.measured import measured as measured
from .sync_batch_norm.participants import participants as participants
