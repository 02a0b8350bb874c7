"""Replacement of ``gluon.contrib.nn.SyncBatchNorm`` by ours in scripts that cannot be edited, and a warning else."""

from __future__ import annotations

from typing import Any, Callable

from ..compat import mx
from ..errors import warn
from .sync_batch_norm.graph import sync_batch_norm_symbol
from .sync_batch_norm.layer import SyncBatchNorm

CONTRIB = mx.gluon.contrib.nn.SyncBatchNorm
_has_warned = False


class ContribSyncBatchNorm(SyncBatchNorm):
    """:class:`.SyncBatchNorm` with the arguments and the parameters' names of ``gluon.contrib.nn.SyncBatchNorm``.

    Args:
        num_devices: ignored; the devices that the layer is initialised on take part.
        in_channels, args, kwargs: as in ``gluon.contrib.nn.SyncBatchNorm``.
    """

    def __init__(self, in_channels: int = 0, num_devices: int | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(1, *args, in_channels=in_channels, **kwargs)  # axis 1

    def _alias(self) -> str:
        return "syncbatchnorm"


def contrib_symbol(
    data: mx.sym.Symbol, *args: Any, ndev: int = 1, key: Any = None, output_mean_var: bool = False, **kwargs: Any
) -> mx.sym.Symbol:
    """:func:`.sync_batch_norm_symbol` with the arguments of ``mx.sym.contrib.SyncBatchNorm``; `key` is ignored.

    Raises:
        ValueError: `output_mean_var` is true.
    """
    if output_mean_var:
        raise ValueError("mx.sym.contrib.SyncBatchNorm: gluon_parallel's has no output_mean_var=True; leave it out")
    return sync_batch_norm_symbol(data, *args, ndev=ndev, **kwargs)


def replace_contrib() -> None:
    """Replace ``gluon.contrib.nn.SyncBatchNorm`` and ``mx.sym.contrib.SyncBatchNorm`` by ours.

    Call it before the import of packages that import these names, such as GluonCV: they would keep MXNet's.
    """
    mx.gluon.contrib.nn.SyncBatchNorm = mx.gluon.contrib.nn.basic_layers.SyncBatchNorm = ContribSyncBatchNorm
    mx.sym.contrib.SyncBatchNorm = contrib_symbol


def warn_of_contrib(
    hybrid_forward: Callable[..., Any], layer: mx.gluon.contrib.nn.SyncBatchNorm, *args: Any, **kwargs: Any
) -> Any:
    """Run MXNet's layer; warn, once in a program, when it is used on several CPU devices."""
    global _has_warned
    if not _has_warned and mx.autograd.is_training() and layer._kwargs["ndev"] > 1:
        mean = layer.running_mean
        devices = mean.list_ctx() if mean._data is not None or mean._deferred_init else []
        if len(devices) > 1 and devices[0].device_type == "cpu":
            _has_warned = True
            warn(
                f"{layer.name}: MXNet's SyncBatchNorm on {len(devices)} CPU devices deadlocks in most nets; "
                "unequal shards make it wrong. Use gp.nn.SyncBatchNorm or gp.nn.convert_sync_batchnorm(net); for a "
                "script that cannot be edited: gluon-parallel run --sync-batch-norm ours script.py (or launch)",
                UserWarning,
            )
    return hybrid_forward(layer, *args, **kwargs)
