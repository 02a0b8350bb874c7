"""What SyncBatchNorm layers do in Python before a launch: checks, :func:`participants`, restart after a failure."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...errors import BarrierBroken, DevicesMismatch, EngineUnsupported, GluonParallelError
from ...mxnet import engine
from ...mxnet.blocks import Executor, options_of
from ...mxnet.compat import mx
from ...mxnet.device_threads import launch_by_device
from ...mxnet.device_threads.thread import here
from ...mxnet.engine import failures, functions
from ...split import as_devices
from ..blocks import blocks_of
from .sync_group import GROUPS, SyncGroup, all_sync_groups, sync_groups_by_token

STATISTICS = ("running_mean", "running_var", "moving_mean", "moving_var")  # ends of their parameters' names
_restarting = threading.Lock()


def sync_groups_of(net: mx.gluon.Block) -> list[SyncGroup]:
    """The sync groups of `net`, found at its running means; those of an imported graph exist after its first run."""
    if not sync_groups_by_token:  # most nets have none; every step asks
        return []
    found = [GROUPS.of(parameter) for parameter in net.collect_params().values()]
    return list(dict.fromkeys(group for group in found if group is not None))


def waiting_sync_groups(net: mx.gluon.Block) -> list[SyncGroup]:
    """The sync groups of `net` whose devices wait for each other in training: all but those of `use_global_stats`."""
    layers = [block for block in blocks_of(net) if isinstance(getattr(block, "sync_group", None), SyncGroup)]
    waiting = {layer.sync_group for layer in layers if not options_of(layer)["use_global_stats"]}
    constant = {layer.sync_group for layer in layers} - waiting
    return [group for group in sync_groups_of(net) if group not in constant]


@contextlib.contextmanager
def participants(net: mx.gluon.Block, devices: Iterable[mx.Context]) -> Iterator[None]:
    """Within this block, `net` is run on `devices` only; its SyncBatchNorm layers wait for no other.

    For the last, small batch of an epoch in a hand-written loop, and for training on one device of several. Put the
    forward *and* the backward pass inside. When devices are left out, the block waits for the operations launched
    before it and, at its end, for its own; then the devices that were left out receive the running statistics. With
    all devices it costs nothing, so a loop may use it for every step.

    If the block raises, the devices that wait in a layer are released at once, rather than after their timeout, and
    the next step starts anew: put a step into it whose data may fail on one device.

    Args:
        net: the block that holds the layers; one without SyncBatchNorm is left alone.
        devices: list of ``mx.Context`` that run the net, each the same number of times.

    Example:
        >>> net = mx.gluon.nn.BatchNorm(in_channels=3)  # or a net with SyncBatchNorm layers
        >>> net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
        >>> shards = [mx.nd.ones((1, 3), mx.cpu(0))]
        >>> with participants(net, [shard.context for shard in shards]):
        ...     with mx.autograd.record():
        ...         outputs = [net(shard) for shard in shards]
    """
    groups, devices, fewer = sync_groups_of(net), as_devices(devices), False
    names = frozenset(map(str, devices))
    restart_if_needed(groups)
    try:
        fewer = any(group.devices() != names for group in groups)
        if fewer:
            mx.nd.waitall()
            for group in groups:
                group.limit_to(names)
        yield
        if fewer:
            mx.nd.waitall()
            _copy_statistics(net, devices)
    except BaseException as error:
        for group in groups:
            group.abandon(error)
        raise
    finally:
        if fewer:
            for group in groups:
                group.limit_to(None)


def _copy_statistics(net: mx.gluon.Block, devices: list[mx.Context]) -> None:
    """Give the devices that were left out the running statistics of those that took part."""
    for parameter in net.collect_params().values():
        if parameter.grad_req == "null" and parameter.name.endswith(STATISTICS):
            source = next((device for device in parameter.list_ctx() if device in devices), None)
            for device in parameter.list_ctx():
                if source is not None and device not in devices:
                    parameter.data(source).copyto(parameter.data(device))


class SynchronisedExecutor(Executor):
    """MXNet's executor of a graph with SyncBatchNorm.

    It calls :func:`begin_call` before every call: after it, no Python code runs until the passes are in the engine.
    """

    def __init__(
        self, symbol: mx.sym.Symbol, flags: Sequence[tuple[str, Any]], groups: Mapping[SyncGroup, int]
    ) -> None:
        super().__init__(symbol, flags)
        self.groups = groups

    def __call__(self, *args: mx.nd.NDArray, **kwargs: Any) -> Any:
        if here.device is None:  # else this thread launches for one device anyway
            launch_by_device()
        if mx.autograd.is_training():
            begin_call(self.groups, args[0].ctx)
        return super().__call__(*args, **kwargs)


def begin_call(groups: Mapping[SyncGroup, int], device: mx.Context) -> None:
    """Check and prepare `groups` for a training call on `device`; ``groups[group]`` is how often it passes a layer."""
    for group in groups:
        if not group.is_prepared():
            _check(group)
    if not functions.has_room:
        engine.make_room()
    restart_if_needed(groups)
    for group, times in groups.items():
        group.prepare()
        group.note_launch(str(device), times)


def _check(group: SyncGroup) -> None:
    """Refuse a training call that could only hang."""
    devices = group.devices()
    if group.store_is_missing:
        raise BarrierBroken(
            f"{group.name}: this graph exchanges through a kvstore object of the program that made it; to train it "
            "here, make the graph anew with kvstore=store, or give the store's name"
        )
    if not devices:
        raise BarrierBroken(f"{group.name}: to train this graph, run it in a gluon block that has its parameters")
    if len(devices) > 1 and os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        raise EngineUnsupported(
            f"{group.name}: {len(devices)} devices cannot exchange under MXNET_ENGINE_TYPE=NaiveEngine, which finishes "
            "one operation before it starts the next. Unset it, or debug with gp.nn.revert_sync_batchnorm(net)"
        )
    if group.num_devices not in (None, len(devices)) and group.only is None:
        raise DevicesMismatch(
            f"{group.name}: num_devices={group.num_devices}, but its parameters live on {len(devices)}: "
            f"{', '.join(sorted(devices))}. Leave num_devices out, or initialise the net with "
            f"ctx=[...] of {group.num_devices} devices (nets on one device each share parameters with params=)"
        )


def restart_if_needed(groups: Collection[SyncGroup]) -> None:
    """Restart all groups if an earlier step has failed or a net has moved to other devices; otherwise do nothing.

    Called before each launch. A restart waits for what is in flight. Groups of other nets keep their failures until
    they are launched again.

    Raises:
        BarrierTimeout, BarrierBroken: the failure of an earlier step of theirs that was not reported yet.
    """
    # Look at all groups now: a step may call its layers one by one, and in its middle to wait would be a deadlock.
    if any(group.has_moved() for group in groups) or _failed_groups():
        restart()
    error = _take_unreported(groups)
    if error is not None:
        for group in all_sync_groups():
            if group.is_launched_in_part():  # its other devices will not come
                group.abandon(error)
        raise failures.fresh(error)
    if failures.kept:
        failures.check()


def _take_unreported(groups: Collection[SyncGroup]) -> BaseException | None:
    """The first unreported failure of the step in which one of `groups` has failed; all of it count as raised then."""
    unreported = next((group.unreported for group in groups if group.unreported), None)
    if unreported is None:
        return None
    with _restarting:  # threads of several devices come here at once
        error = unreported[0] if unreported else None
        unreported.clear()
    return error


def _failed_groups() -> list[SyncGroup]:
    return [group for group in sync_groups_by_token.values() if group.rendezvous.failure is not None]


def restart() -> None:
    """If a group has failed or moved: wait for what is in flight, open it again, and count its devices.

    A failure that nobody has seen stays in ``group.unreported``, for the next step to raise.
    """
    with _restarting:
        before, moved = _failed_groups(), [group for group in all_sync_groups() if group.has_moved()]
        if not before and not moved:
            return  # another device's thread has been here, and may have launched its pass
        reported = {group for group in before if failures.is_reported(group.rendezvous.failure)}
        drain()  # it marks failures as reported, and meanwhile the failed step may fail in more layers
        failed = _failed_groups()
        # If the user has seen a part of the failed step's errors, what failed only since then is a consequence of them.
        concerned = [group for group in (before if reported else failed) if group not in reported]
        unreported = [group.rendezvous.failure for group in concerned]
        for group in concerned:
            group.unreported = unreported
        for group in failed:
            failures.mark_reported(group.rendezvous.failure)
            group.reopen()
        for group in moved:
            group.count_anew()
            group.prepare()


def forget_failures() -> None:
    """Wait for everything that has been launched, and forget what has failed, before all of it is repeated.

    So none of these failures is raised later. The error of an operator of the user's, which nobody has read, is still
    raised by the next :func:`.failures.check`.
    """
    drain()
    for group in all_sync_groups():  # also of this process alone: what those have read may have failed
        group.unreported = []
        if group.rendezvous.failure is not None:
            failures.mark_reported(group.rendezvous.failure)
            group.reopen()
    for error in failures.take_unreported():  # no array carries it, or none that anybody reads
        if isinstance(error, mx.base.MXNetError):
            failures.put_back(error)


def drain() -> None:
    """Wait for everything that has been launched, whatever became of it.

    The error of an operator of the user's, which nobody has read, is raised by the next :func:`.failures.check`, if it
    is older than the failures of this package: of several, ``waitall`` raises the oldest one and forgets the others.
    """
    while True:
        try:
            mx.nd.waitall()
            return
        except (mx.base.MXNetError, GluonParallelError) as error:
            # What was launched meanwhile may fail, too.
            if isinstance(error, mx.base.MXNetError) and not failures.is_ours(str(error)):
                failures.put_back(error)
