"""Recording of a process's steps: operators, Python spans, SyncBatchNorm passes; recordings of all, on one clock."""

import contextlib
import json
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...errors import DeviceUnavailable
from ...kvstore.collective import gather, gather_objects
from ...kvstore.contract import is_distributed
from ...mxnet import profiler
from ...mxnet.compat import mx
from ...nn.sync_batch_norm.measured import Pass

STEP = "step"
_TIMES = ("begin", "end", "began", "arrived", "complete", "reduced", "ended")  # of operators, spans and passes
_ROUNDS = 20  # of exchanges that compare the clocks
# Operators that exchange with other processes. Ours say the key; those of MXNet's servers and Horovod do not.
OURS = re.compile(r"gluon_parallel\.mpi (?:key )?(.+)")
OTHERS = re.compile(r"KVStoreDist|horovod|Horovod")
# Bookkeeping, of the engine and ours.
_IGNORED = {"WaitForVar", "DeleteVariable", "DeleteOperator", "arrives", "gluon_parallel.flight_recorder"}


class Operator(NamedTuple):
    """One operator, or function of ours, in MXNet's engine."""

    device: int  # index into `Recording.devices`; 0 for an exchange with other processes
    name: str
    begin: int  # nanoseconds of the monotonic clock, as are all times here
    end: int


class Span(NamedTuple):
    """What a Python thread did."""

    what: str  # STEP or activities.READING
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

        def move(rows):
            names = [name for name in _TIMES if rows and hasattr(rows[0], name)]
            return [row._replace(**{name: getattr(row, name) + nanoseconds for name in names}) for row in rows]

        return replace(
            self, begin=self.begin + nanoseconds, end=self.end + nanoseconds, operators=move(self.operators),
            spans=move(self.spans), passes=move(self.passes),
            marks=[[mark + nanoseconds for mark in marks] for marks in self.marks],
        )  # fmt: skip


def host():
    """The boot id: processes with the same one share a monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def gathered(store, recording):
    """The recordings of all processes of `store`, or of this one alone, by rank, on the clock of process 0."""
    if not is_distributed(store):
        return [recording]
    times = np.zeros((_ROUNDS, 2))  # since `start`: float64 has too few digits for a monotonic clock in nanoseconds
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
    """
    lower = (reference[:, 0] - times[:, 1]).max()
    upper = (reference[:, 1] - times[:, 0]).min()
    return round((lower + upper) / 2)


def is_exchange(name):
    """Whether that operator exchanges with other processes."""
    return bool(OURS.match(name) or OTHERS.match(name))


@contextlib.contextmanager
def recorded(devices):
    """Record the operators of `devices` in this block, at whose begin and end all work must be done.

    Yields a list, filled with :class:`Operator` in the order of their begins when the block ends. DeviceUnavailable:
    MXNet's profiler has no place for a CPU device.
    """
    beyond = [device for device in devices if not profiler.has_place_for(device)]
    if beyond:
        raise DeviceUnavailable(
            f"MXNet's profiler records cpu(0) to cpu({profiler.NUM_CPUS + 1}) on this machine and would end the "
            f"process at an operator of {beyond[0]}; profile with fewer devices"
        )
    operators: list[Operator] = []
    with profiler.configured(profile_memory=False, profile_symbolic=True, profile_imperative=True) as path:
        before = _behind()
        mx.profiler.set_state("run")
        try:
            yield operators
        finally:
            mx.profiler.set_state("stop")
            behind = (before + _behind()) // 2  # the system's clock may be adjusted meanwhile
            mx.profiler.dump()
            operators += sorted(_read(path, devices, behind), key=lambda one: one.begin)


def _behind():
    """Nanoseconds by which the monotonic clock is behind the system's, which MXNet's profiler reads."""
    return min(time.time_ns() - time.monotonic_ns() for _ in range(5))


def _read(path, devices, behind):
    """The operators in a file of MXNet's profiler."""
    # After the first file of a process the list begins with a comma; once the program has had MXNet's profiler write
    # continuously, which is its default, also without a head.
    text = path.read_text("utf-8")
    rest = text.partition("[")[2] if text.startswith("{") else text
    events = json.loads(f'{{"traceEvents": [{rest.lstrip().lstrip(",")}')["traceEvents"]
    numbers = {
        device.device_id + (profiler.NUM_CPUS if device.device_type == "gpu" else 0): number
        for number, device in enumerate(devices)
    }
    begins: dict = {}
    for event in events:
        # MXNet's stores exchange in pinned memory, which is none of `devices`, so exchanges get number 0.
        device = 0 if is_exchange(event["name"]) else numbers.get(event["pid"])
        if device is None or event["ph"] not in "BE" or event["name"] in _IGNORED:
            continue
        key = event["pid"], event["tid"]
        if event["ph"] == "B":
            begins[key] = event
        else:
            begin, end = (int(one["ts"]) * 1000 - behind for one in (begins.pop(key), event))
            yield Operator(device, event["name"], begin, end)
