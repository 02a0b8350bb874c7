"""Recordings: what a process's devices, Python thread and SyncBatchNorm layers did; those of all, on one clock."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...kvstore.collective import gather, gather_objects
from ...kvstore.contract import is_distributed
from ...nn.sync_batch_norm.measured import Pass

STEP = "step"
_ROUNDS = 20


class Operator(NamedTuple):
    """One operator, or function of ours, in MXNet's engine."""

    device: int  # index into `Recording.devices`
    name: str
    begin: int  # nanoseconds of the monotonic clock, as are all times here
    end: int


class Span(NamedTuple):
    """What a Python thread did."""

    what: str  # STEP or parts.READING
    begin: int
    end: int


@dataclass
class Recording:
    """What one process recorded of consecutive steps."""

    rank: int = 0
    host: str = ""
    num_cores: int = 1  # of the host, that this process may use
    processor: float = 0.0  # seconds of processor time that the process and those it started took
    idle: float = 0.0  # seconds in which these cores were idle, added up over the cores; NaN where that is not known
    begin: int = 0
    end: int = 0
    num_samples: int = 0  # in all steps; 0 where that is not known
    is_by_hand: bool = False  # steps of ``trainer.step`` in a hand-written loop
    would_convert: dict[str, int] = field(default_factory=dict)  # of ``gp.nn.would_convert(net)``
    devices: list[str] = field(default_factory=list)
    marks: list[list[int]] = field(default_factory=list)  # per device: when recording began, and each step ended
    operators: list[Operator] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)  # of the thread that trains
    passes: list[Pass] = field(default_factory=list)  # of SyncBatchNorm layers

    def moved(self, nanoseconds):
        """The same on a clock that is `nanoseconds` ahead."""

        def move(rows, names):
            return [row._replace(**{name: getattr(row, name) + nanoseconds for name in names}) for row in rows]

        changed = Recording(**{**vars(self), "begin": self.begin + nanoseconds, "end": self.end + nanoseconds})
        changed.marks = [[mark + nanoseconds for mark in marks] for marks in self.marks]
        for name in ("operators", "spans"):
            setattr(changed, name, move(getattr(self, name), ("begin", "end")))
        changed.passes = move(self.passes, ("began", "arrived", "complete", "reduced", "ended"))
        return changed


def host():
    """What tells apart the hosts, and so the monotonic clocks, of the processes."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def gathered(store, recording):
    """The recordings of all processes of `store`, or of this one alone, by rank, on the clock of process 0."""
    if not is_distributed(store):
        return [recording]
    times = np.zeros((_ROUNDS, 2))
    start = time.monotonic_ns()
    for number in range(_ROUNDS):
        times[number, 0] = time.monotonic_ns() - start
        gather(store, "gp.profile()", np.zeros(1))
        times[number, 1] = time.monotonic_ns() - start
    all_times = gather(store, "gp.profile()", times.reshape(-1)).reshape(store.num_workers, _ROUNDS, 2)
    starts, found = zip(*gather_objects((start, recording), store, "gp.profile()"))
    return [
        one
        if one.host == found[0].host
        else one.moved(starts[0] - starts[rank] + offset(all_times[0], all_times[rank]))
        for rank, one in enumerate(found)
    ]


def offset(reference, times):
    """How far the clock of `reference` is ahead of that of `times`: (rounds, 2), begin and end of each exchange.

    No exchange ends before all processes have begun it. So each one gives a lower and an upper bound, and the
    estimate is the middle of the tightest bounds.

    Example:
        >>> offset(np.array([[100.0, 103.0]]), np.array([[0.0, 3.0]]))
        100
    """
    lower = (reference[:, 0] - times[:, 1]).max()
    upper = (reference[:, 1] - times[:, 0]).min()
    return round((lower + upper) / 2)
