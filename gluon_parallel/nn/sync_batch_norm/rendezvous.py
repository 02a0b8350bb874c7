"""Shared memory in which the devices of one layer exchange statistics; reallocated when the devices change."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...engine.compiled.pthread import locked, new_condition, new_mutex
from ...engine.compiled.records import Record, address_of, several
from ...kvstore.flight_recorder import RECORDER

if TYPE_CHECKING:
    from ...kvstore.mpi.shared_memory.gathers import SharedGather

NUM_SLOTS = 16  # exchanges of one layer at the same time; more are left to Python
MAX_DEVICES = 62  # one bit each
PATIENCE = 0.1  # seconds after which an exchange is left to Python


class Layer(Record):
    """What compiled code knows of one layer; "address" is that of something that Python keeps alive."""

    mutex: int  # address of the pthread mutex that guards all of this, the slots and their rows
    is_open: int  # 0 once the layer's barrier has failed
    devices: int  # which devices take part, one bit each in the order of their names
    num_rows: int  # how many devices the layer lives on
    channels: int
    slots: int  # address of NUM_SLOTS x Slot
    patience: int  # nanoseconds after which an exchange is left to Python
    spans_processes: int  # whether the last device to come exchanges with other processes
    without_samples: int  # whether this process has no samples in this step
    processes: ctypes.Array = several(2)  # for each direction, address of a Processes; 0 where only Python exchanges
    earlier_calls: int  # before the barrier's count began anew: processes count theirs without interruption
    in_callbacks: int  # nanoseconds that all devices together spent in the operator's passes
    processor: int  # the same in processor time
    waited: int  # of it, for other devices
    exchanged: int  # of it, with other processes
    recorder: int  # address of the flight recorder's Place
    names: ctypes.Array = several(2)  # its numbers of the rendezvous in each direction
    passes: int  # address of a ring of PassTimes; 0 while nobody records
    num_passes: int  # recorded since then


class Slot(Record):
    """One exchange between the devices, in one direction of one call."""

    key: int  # 2 * call + direction
    state: int  # see `compiled.rendezvous`
    arrived: int  # which devices have brought their row, one bit each
    left: int  # which devices are through with it
    complete_at: int  # nanoseconds of the monotonic clock: when the last device came
    changed: int  # address of a pthread condition variable: `state` has changed
    rows: int  # address of (1 + num_rows, 1 + 2 * channels) float64: the result, and a row for each device
    record: int  # its number in the flight recorder; 0 where it has none


class PassTimes(Record):
    """One pass of one device, for :func:`.measured.recorded`; times are nanoseconds of the monotonic clock."""

    device: int  # its number
    key: int  # 2 * call + direction
    began: int
    arrived: int  # at the exchange; where there was none, this and the next two are those of its end
    complete: int  # all devices of this process had arrived
    reduced: int  # the exchange had ended, with the other processes too
    ended: int


NUM_PASSES = 4096  # of a ring


class Processes(Record):
    """An exchange with the processes of this host through shared memory."""

    mutex: int  # address of the store's mutex for this key: one exchange at a time
    group: int  # address of the store's Group, for `compiled_gather`
    key: int  # address of its Key
    num_processes: int
    row: int  # address of (2 + length,) float64: header and values of this process
    rows: int  # address of (num_processes, 2 + length) float64: those of all


class Rendezvous:
    """The memory of one layer, which compiled code knows by the address of `record`.

    `names` are what the flight recorder calls the rendezvous in each direction.
    """

    def __init__(self, names: Sequence[str] = ("forward", "backward")) -> None:
        self.mutex = new_mutex()
        self.record = Layer(mutex=address_of(self.mutex), patience=int(PATIENCE * 1e9))
        self.record.recorder = address_of(RECORDER.place)
        self.record.names[:] = [RECORDER.number_of("rendezvous", label=name) for name in names]
        self.slots: ctypes.Array = (Slot * 0)()
        self.names: list[str] = []
        self._kept: list = []  # what compiled code has addresses of; devices may still wait in outdated memory
        self.prepared: tuple = None, None, None  # the arguments of `prepare` when it was called last

    def prepare(self, all_devices: frozenset[str], only: frozenset[str] | None, channels: int) -> None:
        """Before a call: say who takes part. What is in flight relies on it, so it changes between steps only.

        `all_devices` are the names of the layer's devices (if these are too many, all exchange in Python), and `only`
        those of the devices that take part for now, or None for all.
        """
        wanted = all_devices, only, channels
        if self.prepared == wanted:
            return
        with locked(self.mutex):
            record = self.record
            record.devices = 0
            before, self.prepared = self.prepared, (None, None, None)  # after Ctrl-C in here, all of it is done anew
            if len(all_devices) <= MAX_DEVICES:
                if before[::2] != wanted[::2]:
                    self._allocate(sorted(all_devices), channels)
                here = all_devices if only is None else only & all_devices
                record.devices = sum(1 << self.number(name) for name in here)
            self.prepared = wanted

    @property
    def taking_part(self) -> frozenset[str]:
        """Names of the devices that take part in what is in flight; the layer itself may be deleted by then."""
        all_devices, only, _ = self.prepared
        return all_devices if only is None else only

    def _allocate(self, names: list[str], channels: int) -> None:
        self.names = names
        self.slots = (Slot * NUM_SLOTS)()
        rows = np.zeros((NUM_SLOTS, 1 + len(names), 1 + 2 * channels))
        conditions = [new_condition() for _ in range(NUM_SLOTS)]
        self._kept.append((self.slots, rows, conditions))
        for slot, row, condition in zip(self.slots, rows, conditions):
            slot.rows, slot.changed = address_of(row), address_of(condition)
        self.record.slots, self.record.num_rows, self.record.channels = address_of(self.slots), len(names), channels

    def use_shared_memory(self, direction: int, gather: SharedGather) -> None:
        """Have compiled code exchange with the other processes through this :class:`.SharedGather`."""
        if self.record.processes[direction]:
            return
        rows = np.zeros((1 + gather.num_processes, *gather.shape))
        record = Processes(*gather.addresses, gather.num_processes, address_of(rows[0]), address_of(rows[1:]))
        self._kept.append((gather, record, rows))
        with locked(self.mutex):
            self.record.processes[direction] = address_of(record)

    def leave_processes(self) -> None:
        """Exchange with no other process any more, and count calls anew; nothing is in flight."""
        with locked(self.mutex):
            self.record.processes[:] = [0, 0]
            self.record.spans_processes = self.record.earlier_calls = 0
            self._kept = [kept for kept in self._kept if not isinstance(kept[1], Processes)]

    def number(self, device: str) -> int:
        """Of a device, in the order of their names; -1 for one that the layer does not live on."""
        return self.names.index(device) if device in self.names else -1

    def clear(self) -> None:
        """Free the slots of exchanges that never ended; nothing is in flight."""
        with locked(self.mutex):
            for slot in self.slots:
                slot.state = 0
