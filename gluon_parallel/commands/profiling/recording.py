"""Recording of one process: what its devices, its Python thread and its SyncBatchNorm layers did, and when."""

from dataclasses import dataclass, field
from typing import NamedTuple

from ...nn.sync_batch_norm.measured import Pass

STEP = "step"


class Operator(NamedTuple):
    """One operator, or function of ours, in MXNet's engine."""

    device: int  # index into `Recording.devices`
    name: str
    begin: int  # nanoseconds of the monotonic clock, as are all times here
    end: int
    thread: int


class Span(NamedTuple):
    """What a Python thread did."""

    what: str  # STEP, parts.READING, or the name of the device that the thread launched
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
    launches: list[Span] = field(default_factory=list)  # of the devices' threads
    passes: list[Pass] = field(default_factory=list)  # of SyncBatchNorm layers

    def moved(self, nanoseconds):
        """The same on a clock that is `nanoseconds` ahead."""

        def move(rows, names):
            return [row._replace(**{name: getattr(row, name) + nanoseconds for name in names}) for row in rows]

        changed = Recording(**{**vars(self), "begin": self.begin + nanoseconds, "end": self.end + nanoseconds})
        changed.marks = [[mark + nanoseconds for mark in marks] for marks in self.marks]
        for name in ("operators", "spans", "launches"):
            setattr(changed, name, move(getattr(self, name), ("begin", "end")))
        changed.passes = move(self.passes, ("began", "arrived", "complete", "reduced", "ended"))
        return changed
