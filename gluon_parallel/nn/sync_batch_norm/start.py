"""Start of a call and of a step: what could only hang is refused, and layers begin again after a step that failed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ... import engine
from ...compat import mx
from ...device_threads import launch_by_device
from ...device_threads.thread import current_device
from ...engine import failures, functions
from ...errors import BarrierBroken, DevicesMismatch, EngineUnsupported, GluonParallelError
from .sync_group import SyncGroup, all_groups

_anew = threading.Lock()


class SynchronisedExecutor(mx.nd._internal.CachedOp):
    """MXNet's executor of a graph with SyncBatchNorm.

    It enters the groups of the graph before every call, for it is the last Python code that runs before the call is in
    the engine's hands.
    """

    def __init__(
        self, symbol: mx.sym.Symbol, flags: Sequence[tuple[str, Any]], groups: Mapping[SyncGroup, int]
    ) -> None:
        super().__init__(symbol, flags)
        self.groups = groups

    def __call__(self, *args: mx.nd.NDArray, **kwargs: Any) -> Any:
        if current_device() is None:  # else this thread launches for one device anyway
            launch_by_device()
        if mx.autograd.is_training():
            enter(self.groups, args[0].ctx)
        return super().__call__(*args, **kwargs)


def enter(groups: Mapping[SyncGroup, int], device: mx.Context) -> None:
    """Before a training call is launched on `device`, which comes so many times to the layers of these groups.

    It refuses what could only hang, and does what :func:`start_anew` does.
    """
    for group in groups:
        if not group.is_prepared():
            _check(group)
    if not functions.has_room:
        engine.make_room()
    start_anew(groups)
    for group, times in groups.items():
        group.prepare()
        group.note_launch(str(device), times)


def _check(group: SyncGroup) -> None:
    """Refuse a training call that could only hang."""
    if group.store_is_missing:
        raise BarrierBroken(
            f"{group.name}: this graph exchanges through a kvstore object of the program that made it; to train it "
            "here, make the graph anew with kvstore=store, or give the store's name"
        )
    devices = group.devices()
    if not devices:
        raise BarrierBroken(f"{group.name}: to train this graph, run it in a gluon block that has its parameters")
    count = len(devices)
    if count > 1 and os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        raise EngineUnsupported(
            f"{group.name}: {count} devices cannot exchange under MXNET_ENGINE_TYPE=NaiveEngine, which finishes one "
            "operation before it starts the next. Unset it before Python starts, or use plain BatchNorm (see "
            "gp.nn.revert_sync_batchnorm) while debugging."
        )
    if group.num_devices not in (None, count) and group.only is None:
        raise DevicesMismatch(
            f"{group.name}: num_devices={group.num_devices}, but its parameters live on {count}: "
            f"{', '.join(sorted(devices))}. Leave num_devices out, or initialise the net with "
            f"ctx=[...] of {group.num_devices} devices (nets on one device each share parameters with params=)."
        )


@contextlib.contextmanager
def one_step(groups: Collection[SyncGroup]) -> Iterator[None]:
    """A step of these groups: :func:`start_anew` before it; an exception releases the devices that wait in a layer."""
    start_anew(groups)
    try:
        yield
    except BaseException as error:
        for group in groups:
            group.abandon(error)
        raise


def start_anew(groups: Collection[SyncGroup]) -> None:
    """Before a step of these groups is launched: after one that failed, or on other devices, begin again.

    What is in flight then ends first. Groups of other nets keep their failures until they are launched again.

    Raises:
        BarrierTimeout, BarrierBroken: the failure of an earlier step of theirs that was not reported yet.
    """
    # All layers are asked: in the middle of a step, which may call them one by one, nothing could be waited for.
    if any(group.has_moved() for group in groups) or _failed():
        _begin_again()
    unreported = next((group.unreported for group in groups if group.unreported), None)
    if unreported:
        error = unreported[0]
        unreported.clear()
        for group in all_groups():
            if group.is_launched_in_part():  # its other devices will not come
                group.abandon(error)
        raise failures.fresh(error)


def _failed() -> list[SyncGroup]:
    return [group for group in all_groups() if group.rendezvous.failure is not None]


def _begin_again() -> None:
    with _anew:
        before, moved = _failed(), [group for group in all_groups() if group.has_moved()]
        if not before and not moved:
            return  # another device's thread has been here, and may have launched its pass
        reported = {group for group in before if failures.is_reported(group.rendezvous.failure)}
        drain()  # it marks failures as reported, and meanwhile the failed step may fail in more layers
        failed = _failed()
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


def drain() -> None:
    """Wait for everything that has been launched, whatever became of it."""
    while True:
        try:
            mx.nd.waitall()
            return
        except (mx.base.MXNetError, GluonParallelError):
            continue  # each call raises one error of one device; the next call goes on with the rest
