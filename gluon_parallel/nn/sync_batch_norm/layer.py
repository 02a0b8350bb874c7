"""Batch norm whose statistics are those of the whole batch, over all devices and processes that share it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...errors import BatchMismatch
from ...mxnet.compat import mx
from ...mxnet.compat.array_types import BFLOAT16, as_class_of, as_legacy
from ...mxnet.device_threads import launch_by_device
from ...mxnet.engine import make_plain
from . import graph, operator
from .participants import begin_call
from .sync_group import GROUPS, SyncGroup


class SyncBatchNorm(mx.gluon.nn.BatchNorm):
    """`gluon.nn.BatchNorm` over the samples of all devices (and processes): one device with the whole batch.

    Every device that holds the layer's parameters must run it equally often in every training step, with shards of
    any size; in the forward pass they wait once for each other, to exchange (count, mean, squared deviations), and
    once in the backward pass, to exchange two sums. Devices that have no samples in a step are left out with
    :func:`gluon_parallel.nn.participants`; :class:`gluon_parallel.DataParallel` does that by itself. Outside of
    training mode, and with `use_global_stats`, no device waits for another.

    Differences to `gluon.nn.BatchNorm`: running statistics change in the forward pass (there: in the backward pass, so
    after two forward passes and one backward pass over both, MXNet's layer has moved by the second one first). They
    hold the biased variance on every kind of device; float16 inputs work on every device. Parameters and their names
    are the same, so files of parameters go both ways, and an exported graph has plain BatchNorm operators.

    Args:
        args, kwargs: `axis`, `momentum`, `epsilon` and all others of `gluon.nn.BatchNorm`.
        num_devices: how many devices of this process take part; by default those that the layer is initialised on.
        kvstore: links the processes: a name such as ``"dist_sync"`` or a KVStore that sums. By default only the
            devices of this process do, unless ``gp.prepare`` hands over its store. A store given as an object is used
            with keys from 2**20 on.
        timeout: seconds that a device waits for the others before it raises; by default ``GLUON_PARALLEL_TIMEOUT``
            where that is set, as it is by the launcher, and 120 elsewhere. Over the store ``mpi``, processes wait for
            each other as long as that store does.
        group: which processes of `kvstore` share statistics: all of them (None), those of each host (``"host"``), or
            groups of so many consecutive ones. For any others, hand over the store of a group as `kvstore`, see
            ``gp.kvstore.group``.

    Raises:
        BarrierTimeout: while training, a device did not come; names the layer, the call, and who is missing.
        BarrierBroken: while training, another device failed.
        DevicesMismatch: `num_devices` are not the devices that the parameters live on.
        EngineUnsupported: several devices and ``MXNET_ENGINE_TYPE=NaiveEngine``.
        ValueError: `group` is none of these, or does not divide the number of processes.
        StoreUnavailable: the store has no groups: only ``mpi`` has some.

    Example:
        >>> devices = [mx.cpu(0), mx.cpu(1)]
        >>> layer = SyncBatchNorm(in_channels=1)
        >>> layer.initialize(ctx=devices)
        >>> shards = [mx.nd.array([[1.0], [2.0], [3.0]], devices[0]), mx.nd.array([[6.0]], devices[1])]
        >>> with mx.autograd.train_mode():
        ...     outputs = [layer(shard) for shard in shards]
        >>> [round(float(y), 3) for output in outputs for y in output.asnumpy().ravel()]
        [-1.069, -0.535, 0.0, 1.604]
    """

    def __init__(
        self,
        *args: Any,
        num_devices: int | None = None,
        kvstore: Any = None,
        timeout: float | None = None,
        group: str | int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if num_devices is not None and num_devices < 1:
            raise ValueError(f"{self.name}: num_devices={num_devices!r}; expected a number of at least 1, or None")
        self._synchronise(num_devices, kvstore, timeout, group)

    def _alias(self) -> str:
        return "batchnorm"  # so that parameters are called what BatchNorm calls them

    def _synchronise(self, num_devices: int | None, *args: Any) -> None:
        """Layers that share their running mean are one layer to the others, so they share the sync group."""
        self.num_devices = num_devices
        parameter = self.running_mean
        if GROUPS.of(parameter) is None:
            GROUPS.set(parameter, SyncGroup(self.name, num_devices, *args, parameter=parameter))
        operator.load()
        launch_by_device()

    @property
    def sync_group(self) -> SyncGroup:
        """Which devices and processes take part in the exchanges."""
        return GROUPS.read(self.running_mean)

    def _call_cached_op(self, x: mx.nd.NDArray) -> mx.nd.NDArray:
        """Hybridized outside of a hybridized net: a graph of one node would copy what it takes and returns."""
        if self._cached_op is None:
            self._build_cache(x)  # which `export` writes
        parameters = {name: parameter.data(x.ctx) for name, parameter in self._reg_params.items()}
        return self.hybrid_forward(mx.nd, x, **parameters)

    def hybrid_forward(self, F: ModuleType, x: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any) -> Any:
        """Normalise `x`; see :class:`SyncBatchNorm`."""
        if F is mx.sym:
            batch_norm = F.npx.batch_norm if mx.util.is_np_array() else F.BatchNorm
            mark = {graph.MARK: graph.OF_LAYER}
            return batch_norm(x, gamma, beta, running_mean, running_var, name="fwd", attr=mark, **self._kwargs)
        launch_by_device()
        like = x
        x, gamma, beta, running_mean, running_var = map(as_legacy, (x, gamma, beta, running_mean, running_var))
        if not x.size:
            raise BatchMismatch(
                f"{self.name}: {x.ctx} has no samples (shape {x.shape}), which MXNet's operators cannot take; run "
                "the net on the other devices only, inside `with gp.nn.participants(net, devices):`"
            )
        axis = self._kwargs["axis"]
        if not -x.ndim <= axis < x.ndim:
            raise BatchMismatch(
                f"{self.name}: axis={axis} must be the axis of the channels, but the input has shape {x.shape}"
            )
        if mx.autograd.is_training() and not self._kwargs["use_global_stats"]:
            begin_call({self.sync_group: 1}, x.ctx)
        if like.dtype == BFLOAT16:  # the operator's arithmetic is in float32
            x = F.amp_cast(x, dtype="float32")
        # Like `graph.synchronised`, but the forward pass copies nothing: squeeze writes to where it reads. Where only
        # zeros come back, the gradient of squeeze is `zeros_like` of its input. Outside of graphs MXNet then needs that
        # array, and the process crashes if it was not kept.
        make_plain(x)
        arrays = x, gamma, beta, running_mean, running_var
        options = {"token": self.sync_group.token, "keeps_output": True, **self._kwargs}
        y = F.Custom(*arrays, op_type=operator.NAME, **options)
        y = F.squeeze(y, axis=(), out=y.detach())
        return as_class_of(F.amp_cast(y, dtype=BFLOAT16) if like.dtype == BFLOAT16 else y, like)
