"""Trace of all processes in the format of Chrome's tracing, which Perfetto opens."""

import itertools
import json

from . import exchanges
from .recording import STEP


def write_trace(path, analysis):
    """Write the trace of the recordings of an :class:`.Analysis`."""
    start = min(one.begin for one in analysis.recordings)
    events = [event for pair in zip(analysis.recordings, analysis.exchanges) for event in _events(*pair, start)]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _events(recording, found, start):
    """The events of one process: rows for its script, for each device, and for the exchanges."""
    rank, numbers = recording.rank, itertools.count(1)

    def rows(title, slices):
        """Each of the slices (name, begin, end, slices inside it), in the first row that is free then."""
        ends: list[int] = []
        ids: list[int] = []
        for name, begin, end, inside in sorted(slices, key=lambda one: one[1]):
            row = next((row for row, last in enumerate(ends) if last <= begin), len(ends))
            if row == len(ends):
                ends.append(0)
                ids.append(next(numbers))
                about = {"ph": "M", "pid": rank, "tid": ids[row]}
                yield {**about, "name": "thread_name", "args": {"name": title}}
                yield {**about, "name": "thread_sort_index", "args": {"sort_index": ids[row]}}
            ends[row] = end
            for what, first, last in [(name, begin, end), *inside]:
                if first < last or what == name:
                    times = {"ts": (first - start) / 1e3, "dur": (last - first) / 1e3}
                    yield {"ph": "X", "pid": rank, "tid": ids[row], "name": what, **times}

    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    steps = itertools.count(1)
    names = [f"step {next(steps)}" if span.what == STEP else span.what for span in recording.spans]
    yield from rows("script", [(name, span.begin, span.end, ()) for name, span in zip(names, recording.spans)])
    for number, device in enumerate(recording.devices):
        operators = [one for one in recording.operators if one.device == number]
        runs = [one for one in operators if not exchanges.is_exchange(one.name)]
        yield from rows(device, [(one.name, one.begin, one.end, ()) for one in runs])
        passes = [one for one in recording.passes if one.device == device]
        slices = [
            (f"{one.layer}, {one.direction}", one.began, one.ended, [
                ("waiting for other devices", one.arrived, one.complete),
                ("exchange with other processes", one.complete, one.reduced),
            ])
            for one in passes
        ]  # fmt: skip
        yield from rows(f"{device}, SyncBatchNorm", slices)
    slices = [
        (one.what, one.ready, one.end, [("waiting for a late process", one.ready, one.all_ready)])
        for one in found if one.is_operator
    ]  # fmt: skip
    yield from rows("exchange with processes", slices)
