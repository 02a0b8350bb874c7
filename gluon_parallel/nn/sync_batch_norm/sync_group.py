"""Sync group: a layer's devices, its exchanges with other processes, and how often each device was launched.

The devices exchange in a :class:`.Rendezvous`, of which each group has one.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
import weakref
from typing import Any, NoReturn

import numpy as np

from ...environment import default_timeout
from ...errors import DeviceNotLaunched
from ...kvstore import check_sync_group, separate_training, sync_group
from ...kvstore.exchange import StatisticsExchange, open_store
from ...mxnet import engine
from ...mxnet.attached import Attached
from ...mxnet.compat import mx
from ...mxnet.device_threads import StuckLoop, note_wait
from ...mxnet.device_threads.hand_written_loops import may_have_gone_backward
from ...mxnet.engine import failures
from .rendezvous import DIRECTIONS, Rendezvous

_LOOP = """Launch all devices before you read a result of one:

    with autograd.record():
        losses = [loss(net(x), y) for x, y in zip(xs, ys)]  # the forward pass of all devices
    autograd.backward(losses)                               # the backward pass of all devices
    values = [l.asnumpy() for l in losses]                  # now read"""
HANDED_OVER = "handed over"  # instead of a store's name, in a graph's marks
# A custom operator is given nothing but strings, so it finds its group by a token. Weak, so that a group lives as long
# as its running mean.
sync_groups_by_token: weakref.WeakValueDictionary[str, SyncGroup] = weakref.WeakValueDictionary()
# Of the running means of layers: layers that share it share the group, and it cannot be copied.
GROUPS: Attached[SyncGroup] = Attached("sync_group", is_copied=True)
stores: dict[str, object] = {}  # of marks in graphs, by token: JSON cannot hold them


class SyncGroup:
    """The sync group of all layers that share one running mean; most arguments are those of :class:`SyncBatchNorm`.

    Args:
        name: the layer's name, for errors.
        parameter: the layer's running mean, which knows the devices; None for that of a graph that no block runs.
    """

    def __init__(
        self,
        name: str,
        num_devices: int | None = None,
        kvstore: Any = None,
        timeout: float | None = None,
        group: str | int | None = None,
        *,
        parameter: mx.gluon.Parameter | None = None,
    ) -> None:
        timeout = default_timeout(120) if timeout is None else timeout
        self.name = name
        self.token = uuid.uuid4().hex
        self.num_devices = num_devices
        self.timeout = timeout
        self.kind = check_sync_group(group, name)  # which processes share statistics
        self.by_operators = False  # whether MXNet's operators compute on CPUs too; tests set it before the first pass
        self.store_is_missing = False  # whether its store is an object of another program
        self.only: frozenset[str] | None = None  # names of the devices that take part for now, if not all
        self.rendezvous = Rendezvous(name, timeout, self._explain_missing)
        self.unused_states: dict = {}  # of operators, see `operator.OperatorState.take`
        self._launched: dict[str, int] = {}  # device -> calls launched since the calls were counted anew
        self._launched_at: dict[str, float] = {}  # device -> when the last one was
        # Failures of the step in which this group failed, until one of its groups raises the first of them.
        self.unreported: list[BaseException] = []
        self._watched: tuple = None, None  # the key that is waited at, and what watches it
        self._parameter: Any = (lambda: None) if parameter is None else weakref.ref(parameter)
        self._exchanges: dict[str, StatisticsExchange] = {}
        self._are_open = False  # at the store, for this number of channels
        self.store: Any = None
        self.whole: Any = None  # the store of which `store` is a part, or the same
        if kvstore is not None:
            self.connect(open_store(kvstore))
        if not self.spans_processes:
            separate_training.note(
                "SyncBatchNorm", False, "takes the statistics of this process alone (write kvstore=store)"
            )
        sync_groups_by_token[self.token] = self

    def connect(self, store: Any) -> None:
        """Meet the other processes of the group through `store`; before the first training call, and in all of them."""
        self.store, self.whole = sync_group(store, self.kind, self.name), store
        if store.num_workers > 1:
            separate_training.note("SyncBatchNorm", True, "")
        if self.store.num_workers > 1:
            for direction in DIRECTIONS:
                self._exchanges[direction] = StatisticsExchange(self.store, f"{self.name}, {direction}", self.timeout)
            self.rendezvous.record.spans_processes = 1

    def reconnect(self, store: Any) -> None:
        """Meet the processes that `store` has by now, which are others; nothing is in flight."""
        self._exchanges.clear()
        self._are_open = False
        self.rendezvous.leave_processes()
        self.reopen()
        self.connect(store)

    @property
    def exchanges(self) -> list[StatisticsExchange]:
        """Those with other processes, forward and backward; none where there are no others."""
        return list(self._exchanges.values())

    @property
    def spans_processes(self) -> bool:
        """Whether the layers exchange with other processes."""
        return bool(self._exchanges)

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise TypeError(f"{self.name}: this layer cannot be copied; build a new net and load parameters")

    def _all_devices(self) -> frozenset[str]:
        parameter = self._parameter()
        return frozenset() if parameter is None else frozenset(map(str, parameter.list_ctx()))

    def devices(self) -> frozenset[str]:
        """Names of the devices that take part."""
        return self._all_devices() if self.only is None else self.only

    def note_launch(self, device: str, times: int) -> None:
        """A call is launched on `device` that comes `times` times to this layer."""
        self._launched[device] = self._launched.get(device, 0) + times
        self._launched_at[device] = time.monotonic()

    def _explain_missing(
        self, direction: str, call: int, waiting: list[str], missing: list[str]
    ) -> DeviceNotLaunched | None:
        """The error that ends a wait for devices which cannot be launched any more; None while they may come."""
        note_wait()
        if direction == "forward" and any(self._launched.get(name, 0) > call for name in missing):
            return None
        times = {name: self._launched_at.get(name, 0.0) for name in missing}
        if direction == "backward" and any(may_have_gone_backward(name, since) for name, since in times.items()):
            return None
        if self._watched[0] != (direction, call):
            self._watched = (direction, call), StuckLoop()
        wait = self._watched[1].look()
        if wait is None:
            return None
        return DeviceNotLaunched(
            f"{self.name}, {direction} {call}: {', '.join(waiting)} waits for {', '.join(missing)}, whose {direction} "
            f"pass is not launched, because the loop waits for a result first: {wait}. {_LOOP}"
        )

    def has_moved(self) -> bool:
        """Whether the layer was called, and lives on other devices than then."""
        before = self.rendezvous.prepared[0]
        return bool(before) and self._all_devices() not in (before, frozenset())

    def is_prepared(self) -> bool:
        """Whether the devices that take part are those of the last call."""
        before = self.rendezvous.prepared
        return bool(before[0]) and before[:2] == (self._all_devices(), self.only)

    def prepare(self) -> None:
        """Before the first call: tell the store about this layer; in every process, in the same order of layers."""
        (channels,) = self._parameter().shape
        taking_part = self._all_devices(), self.only, channels
        if self.rendezvous.prepared != taking_part:
            self.rendezvous.prepare(*taking_part)
        if self._exchanges and not self._are_open:
            self._exchanges["forward"].prepare(1 + 2 * channels)
            self._exchanges["backward"].prepare(2 * channels)
            self._are_open = True

    def allreduce_processes(self, key: tuple[str, int], value: np.ndarray, has_begun: bool = False) -> np.ndarray:
        """The packed values of all processes, from those of this one; `has_begun`: the C library has sent them.

        After the first exchange, the C library makes the next ones without Python where all processes are on one host.
        """
        direction, call = key
        exchange, number = self._exchanges[direction], DIRECTIONS.index(direction)
        combined = exchange.combine(self.rendezvous.record.earlier_calls + call, value, number, has_begun)
        if exchange.shared_gather is not None:
            self.rendezvous.use_shared_memory(number, exchange.shared_gather)
        return combined

    def limit_to(self, names: frozenset[str] | None) -> None:
        """Have only these devices take part from now on, or all if None. Only while nothing is in flight."""
        self.only = names
        if self.rendezvous.failure is None:
            self.count_anew()  # devices that are left out miss calls

    def count_anew(self) -> None:
        """Count the calls of each device from 0; nothing is in flight."""
        self.rendezvous.record.earlier_calls += self.rendezvous.calls
        self.reopen()

    def reopen(self) -> None:
        """Start anew after a failure; no thread of the failed step may still be in an exchange."""
        self._launched.clear()
        self.rendezvous.open()

    def is_launched_in_part(self) -> bool:
        """Whether some of its devices have been launched more often than others."""
        return bool(self._launched) and len({self._launched.get(name, 0) for name in self.devices()}) > 1

    def abandon(self, reason: str | BaseException) -> None:
        """Release the devices that wait here; refuse later ones of the same step. The caller knows the reason."""
        self.rendezvous.abandon(reason)
        failures.mark_reported(self.rendezvous.failure)

    def callback_failed(self, error: BaseException, arrays: list[mx.nd.NDArray]) -> None:
        """A device's callback raised `error`: release the other devices, and fail `arrays`."""
        self.rendezvous.abandon(error)
        with _failing:
            time.sleep(_BETWEEN)
            engine.fail(arrays, self.rendezvous.failure or error)


# A custom operator of MXNet's hands its arrays' exception on in a thread of the engine, a moment after its callback has
# returned. Where two do so at once, both write to the same place of the engine's list of exceptions, which has no lock,
# and later the process crashes. So devices fail one after the other.
_failing = threading.Lock()
_BETWEEN = 0.01  # seconds


def all_sync_groups() -> list[SyncGroup]:
    """The groups of all layers that live."""
    return list(sync_groups_by_token.values())


def group_of(parameter: mx.gluon.Parameter | None, mark: str, name: str) -> SyncGroup | None:
    """The group of a marked node of a graph: its layer's, or one that the node describes in JSON; or None.

    `parameter` is the node's running mean, in the block that runs the graph. So the graph of a layer belongs to its
    group where it shares the parameters, and not where it was exported and imported.
    """
    group = None if parameter is None else GROUPS.of(parameter)
    if group is None and mark.startswith("{"):
        options = json.loads(mark)
        token, kvstore = options.pop("token"), options.pop("kvstore", None)
        missing = kvstore == HANDED_OVER and token not in stores
        store = None if missing else stores.get(token, kvstore)
        group = SyncGroup(name, kvstore=store, parameter=parameter, **options)
        group.store_is_missing = missing
        if parameter is not None:
            GROUPS.set(parameter, group)
    return group
