"""Batch norm over all devices and processes that share a batch."""
