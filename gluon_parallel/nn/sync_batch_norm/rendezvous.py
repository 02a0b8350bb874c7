"""Rendezvous of one layer's devices: time limits, and errors that name the missing devices.

The devices exchange in the C library (`native/rendezvous.c`), which asks this file about all that is late or wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from ... import native
from ...errors import BarrierBroken, BarrierTimeout
from ...kvstore import flight_recorder
from ...kvstore.flight_recorder import RECORDER
from ...native import locked, new_mutex
from ...native.records import C, address_of

if TYPE_CHECKING:
    from ...kvstore.mpi.shared_memory.rows import SharedGather

DIRECTIONS = "forward", "backward"
_PATIENCE = 0.1  # seconds after which a device that waits asks whether to wait on


class Rendezvous:
    """The devices of one layer exchange statistics, call after call; the last to come asks the other processes.

    When one exchange fails, all devices that wait are released with the reason, and all that come later are refused,
    until :meth:`open`: a result that mixes an abandoned step with the next one is worse than none.

    Args:
        name: the layer, for errors.
        timeout: seconds to wait for the other devices at each call; a new value also counts for those that wait.
        explain: function of (direction, call, devices that wait, devices that are missing), called while a device
            waits; it returns None, or an exception that ends the wait because the missing devices cannot come.
    """

    def __init__(
        self, name: str, timeout: float, explain: Callable[[str, int, list[str], list[str]], Exception | None]
    ) -> None:
        self.name, self.timeout, self._explain = name, timeout, explain
        self.mutex = new_mutex()
        self.record = C.Layer(mutex=address_of(self.mutex), is_open=1, patience=int(_PATIENCE * 1e9))
        self.address = address_of(self.record)
        self.record.recorder = address_of(RECORDER.record)
        self.record.names[:] = [RECORDER.number_of("rendezvous", label=f"{name}, {one}") for one in DIRECTIONS]
        self.names: list[str] = []
        self.failure: BaseException | Any = None  # the error with which an exchange has failed; None while it is open
        self.prepared: tuple = None, None, None  # the arguments of `prepare` when it was called last
        self.ring: Any = ()  # of passes that are recorded; the C library may have its address
        self._lock = threading.Lock()
        self._calls: dict[str, Any] = {}
        self._takes_part = np.zeros(0, np.int8)
        self._kept: list = []  # what the C library has addresses of

    def __del__(self) -> None:
        _open(self.address, 0)

    def prepare(self, all_devices: frozenset[str], only: frozenset[str] | None, channels: int) -> None:
        """Say who takes part, between steps: of the devices of these names those in `only`, or all if it is None."""
        with locked(self.mutex):
            names = sorted(all_devices)
            here = all_devices if only is None else only & all_devices
            takes_part = np.array([name in here for name in names], np.int8)
            record = self.record
            record.takes_part, record.num_devices, record.channels = address_of(takes_part), len(names), channels
            record.num_taking_part = len(here)
            self.names, self._takes_part, self.prepared = names, takes_part, (all_devices, only, channels)

    @property
    def taking_part(self) -> list[str]:
        """Names of the devices that take part in what is in flight."""
        return _named(self.names, self._takes_part)

    def use_shared_memory(self, direction: int, gather: SharedGather) -> None:
        """Have the C library exchange with the other processes through this :class:`.SharedGather`."""
        if self.record.processes[direction]:
            return
        rows = np.zeros((1 + gather.num_processes, *gather.shape))
        record = C.Processes(*gather.addresses, gather.num_processes, address_of(rows[0]), address_of(rows[1:]))
        self._kept.append((gather, record, rows))
        with locked(self.mutex):
            self.record.processes[direction] = address_of(record)

    def leave_processes(self) -> None:
        """Exchange with no other process any more, and count calls anew; nothing is in flight."""
        with locked(self.mutex):
            self.record.processes[:] = [0, 0]
            self.record.spans_processes = self.record.earlier_calls = 0
            self._kept.clear()

    def number(self, device: str) -> int:
        """Of a device, in the order of their names; -1 for one that the layer does not live on."""
        return self.names.index(device) if device in self.names else -1

    def calls_of(self, device: str) -> Any:
        """The Counter of this device's calls, which the C library counts up."""
        with self._lock:
            return self._calls.setdefault(device, C.Counter())

    @property
    def calls(self) -> int:
        """How many calls a device has made since the last :meth:`open`."""
        with self._lock:
            return max((count.value for count in self._calls.values()), default=0)

    def abandon(self, reason: str | BaseException) -> None:
        """:meth:`close` with an error that tells the `reason`, a sentence or an exception."""
        cause = reason if isinstance(reason, BaseException) else None
        words = reason if cause is None else f"{type(cause).__name__}: {cause}"
        error = BarrierBroken(f"{self.name}: the step was abandoned: {words}")
        error.__cause__ = cause
        self.close(error)

    def close(self, error: BaseException) -> None:
        """Release all devices that wait here with `error`, and refuse all that come, until :meth:`open`."""
        with self._lock:
            if self.failure is None:
                self.failure = error
        _close(self.address)

    def open(self) -> None:
        """Start anew after a failure: calls count from 0. No thread of the failed step may still call."""
        with self._lock:
            self.failure = None
            for count in self._calls.values():
                count.value = 0
        _open(self.address, 1)

    # The C library calls the next two, by way of `OperatorState`.

    def wait_on(self, device: str, key: int, arrived: Sequence[int], since: float) -> None:
        """Close the layer if the devices that have not arrived cannot come, or are too late.

        `device` waits since that ``time.monotonic()``; numbers in `arrived` are not 0 for devices that have arrived.
        """
        came = _named(self.names, arrived)
        missing = sorted(set(self.taking_part) - set(came))
        error = self._explain(*named(key), came, missing)
        if error is None and time.monotonic() > since + self.timeout:
            waited = f"{self._where(key)}: {device} waited {self.timeout:g} s"
            recorded = flight_recorder.write(f"BarrierTimeout: {waited}")
            error = BarrierTimeout(
                f"{waited}; {_listed(came)} arrived, {_listed(missing)} did not{self._seen(missing)}. Every device "
                "must run the same layers equally often, in the same order. Look for an error on a missing device, a "
                "device without samples (see gp.nn.participants), or a value of another device that it computes with "
                f"before its forward pass; or raise the timeout. {recorded}"
            )
        if error is not None:
            self.close(error)

    def refuse(self, device: str, key: int) -> None:
        """Close the layer for a device that must not come to this exchange: it takes no part, or comes twice."""
        came = "came twice to" if device in self.taking_part else "takes no part in"
        self.close(BarrierBroken(
            f"{self._where(key)}: {device} {came} this rendezvous of {_listed(self.taking_part)}. Every device must "
            "run the same layers equally often; devices that take part in a smaller step are named beforehand."
        ))  # fmt: skip

    def _seen(self, missing: Iterable[str]) -> str:
        places = []
        for device in missing:
            key = _waits_at(self.address, self.number(device))
            places += [f"{device} waits at {' '.join(map(str, named(key)))}"] if key >= 0 else []
        calls = [f"{device} has come to {self.calls_of(device).value} calls" for device in missing]
        return f" ({'; '.join(places + calls)})"

    def _where(self, key: int) -> str:
        return f"{self.name}, {' '.join(map(str, named(key)))}"


def named(key: int) -> tuple[str, int]:
    """The direction and the number of a call, from the key of its exchange."""
    call, direction = divmod(key, 2)
    return DIRECTIONS[direction], call


def _named(names: Sequence[str], numbers: Iterable[int]) -> list[str]:
    return [name for name, number in zip(names, numbers) if number]


def _listed(devices: Iterable[str]) -> str:
    return ", ".join(sorted(devices)) or "nobody"


_close, _open = native.function("gp_close_layer", 1), native.function("gp_open_layer", 2)
_waits_at = native.function("gp_waits_at", 2)
