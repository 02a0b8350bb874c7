"""Shared memory in which the devices of one layer exchange statistics; reallocated when the devices change."""

import numpy as np

from ...engine.pthread import address_of, locked, new_condition, new_mutex
from ...kvstore.flight_recorder import RECORDER

NUM_SLOTS = 16  # exchanges of one layer at the same time; more are left to Python
MAX_DEVICES = 62  # one bit each
PATIENCE = 0.1  # seconds after which an exchange is left to Python

# What compiled code knows of one layer. "Address" is the memory address of something that Python keeps alive.
RENDEZVOUS = np.dtype([
    ("mutex", "i8"),  # address of the pthread mutex that guards all of this, the slots and their rows
    ("is_open", "i8"),  # 0 once the layer's barrier has failed
    ("devices", "i8"),  # which devices take part, one bit each in the order of their names
    ("num_rows", "i8"),  # how many devices the layer lives on
    ("channels", "i8"),
    ("slots", "i8"),  # address of NUM_SLOTS x SLOT
    ("patience", "i8"),  # nanoseconds after which an exchange is left to Python
    ("meets_processes", "i8"),  # whether the last device to come exchanges with other processes
    ("without_samples", "i8"),  # whether this process has no samples in this step
    ("exchanges", "i8", (2,)),  # addresses of PROCESSES for each direction; 0 where only Python can exchange
    ("earlier_calls", "i8"),  # before the barrier's count began anew: processes count theirs without interruption
    ("in_callbacks", "i8"),  # nanoseconds that all devices together spent in the operator's passes
    ("processor", "i8"),  # the same in processor time
    ("waited", "i8"),  # of it, for other devices
    ("exchanged", "i8"),  # of it, with other processes
    ("recorder", "i8"),  # address of the word that says where the flight recorder is
    ("names", "i8", (2,)),  # its numbers of the rendezvous in each direction
    ("passes", "i8"),  # address of a ring of PASS; 0 while nobody records
    ("num_passes", "i8"),  # recorded since then
])  # fmt: skip

# One exchange between the devices, in one direction of one call.
SLOT = np.dtype([
    ("key", "i8"),  # 2 * call + direction
    ("state", "i8"),  # see compiled.meet
    ("came", "i8"),  # which devices have brought their row, one bit each
    ("left", "i8"),  # which devices are through with it
    ("complete_at", "i8"),  # nanoseconds of the monotonic clock: when the last device came
    ("changed", "i8"),  # address of a pthread condition variable: `state` has changed
    ("rows", "i8"),  # address of (1 + num_rows, 1 + 2 * channels) float64: the result, and a row for each device
    ("record", "i8"),  # its number in the flight recorder; 0 where it has none
])  # fmt: skip

# One pass of one device, for :func:`.measured.recorded`; times are nanoseconds of the monotonic clock.
PASS = np.dtype([
    ("device", "i8"),  # its number
    ("key", "i8"),  # 2 * call + direction
    ("began", "i8"),
    ("came", "i8"),  # to the exchange; where there was none, this and the next two are those of its end
    ("complete", "i8"),  # all devices of this process had come
    ("met", "i8"),  # the exchange had ended, with the other processes too
    ("ended", "i8"),
])  # fmt: skip
NUM_PASSES = 4096  # of a ring

# An exchange with the processes of this host through shared memory.
PROCESSES = np.dtype([
    ("mutex", "i8"),  # address of the store's mutex for this key: one exchange at a time
    ("store", "i8"),  # address of the store's record of this process, for `compiled_gather`
    ("key", "i8"),  # address of its record of this key
    ("num_processes", "i8"),
    ("row", "i8"),  # address of (2 + length,) float64: header and values of this process
    ("rows", "i8"),  # address of (num_processes, 2 + length) float64: those of all
])  # fmt: skip


class Rendezvous:
    """The memory of one layer, which compiled code knows by the address of `record`.

    `names` are what the flight recorder calls the rendezvous in each direction.
    """

    def __init__(self, names=("forward", "backward")):
        self.mutex = new_mutex()
        self.record = np.zeros(1, RENDEZVOUS)
        self.record["mutex"], self.record["patience"] = address_of(self.mutex), int(PATIENCE * 1e9)
        self.record["recorder"] = address_of(RECORDER.where)
        self.record["names"] = [RECORDER.number_of("rendezvous", label=name) for name in names]
        self.is_open = self.record["is_open"]  # (1,) a view
        self.slots = np.zeros(0, SLOT)
        self.names: list[str] = []
        self._kept: list = []  # what compiled code has addresses of; devices may still wait in outdated memory
        self.prepared: tuple = None, None, None  # the arguments of `prepare` when it was called last

    def prepare(self, all_devices, only, channels):
        """Before a call: say who takes part. What is in flight relies on it, so it changes between steps only.

        `all_devices` are the names of the layer's devices (if these are too many, all exchange in Python), and `only`
        those of the devices that take part for now, or None for all.
        """
        wanted = all_devices, only, channels
        if self.prepared == wanted:
            return
        with locked(self.mutex):
            record = self.record
            record["devices"] = 0
            before, self.prepared = self.prepared, (None, None, None)  # after Ctrl-C in here, all of it is done anew
            if len(all_devices) <= MAX_DEVICES:
                if before[::2] != wanted[::2]:
                    self._allocate(sorted(all_devices), channels)
                here = all_devices if only is None else only & all_devices
                record["devices"] = sum(1 << self.number(name) for name in here)
            self.prepared = wanted

    def _allocate(self, names, channels):
        self.names = names
        self.slots = np.zeros(NUM_SLOTS, SLOT)
        rows = np.zeros((NUM_SLOTS, 1 + len(names), 1 + 2 * channels))
        conditions = [new_condition() for _ in range(NUM_SLOTS)]
        self._kept.append((self.slots, rows, conditions))
        self.slots["changed"] = [address_of(condition) for condition in conditions]
        self.slots["rows"] = [address_of(row) for row in rows]
        self.record["slots"] = address_of(self.slots)
        self.record["num_rows"], self.record["channels"] = len(names), channels

    def share(self, direction, gather):
        """Have compiled code exchange with the other processes through this :class:`.SharedGather`."""
        if self.record["exchanges"][0, direction]:
            return
        record = np.zeros(1, PROCESSES)
        rows = np.zeros((1 + gather.num_processes, *gather.shape))
        record["mutex"], record["store"], record["key"] = gather.addresses
        record["num_processes"] = gather.num_processes
        record["row"], record["rows"] = address_of(rows[0]), address_of(rows[1:])
        self._kept.append((gather, record, rows))
        with locked(self.mutex):
            self.record["exchanges"][0, direction] = address_of(record)

    def number(self, device):
        """Of a device, in the order of their names; -1 for one that the layer does not live on."""
        return self.names.index(device) if device in self.names else -1

    def clear(self):
        """Free the slots of exchanges that never ended; nothing is in flight."""
        with locked(self.mutex):
            self.slots["state"] = 0
