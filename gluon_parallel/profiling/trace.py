"""Trace of all processes in the format of Chrome's tracing, which Perfetto opens."""

from __future__ import annotations

import json

from . import exchanges
from .recording import STEP

_SCRIPT, _DEVICE = 1, 10  # numbers of the rows of a process; ten for each device
_LAUNCHES, _LAYERS, _EXCHANGES = 1, 2, 3  # of a device; before them its operators, after them the exchanges


def write_trace(path, recordings):
    """Write a trace.

    Args:
        path: of the file.
        recordings: list of :class:`.Recording` on one clock.
    """
    start = min(one.begin for one in recordings)
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": list(_events(recordings, start)), "displayTimeUnit": "ms"}, file)


def _events(recordings, start):
    found = exchanges.of_processes(recordings)
    for recording, own in zip(recordings, found):
        rank = recording.rank

        def named(row, name, rank=rank):
            yield {"ph": "M", "pid": rank, "tid": row, "name": "thread_name", "args": {"name": name}}
            yield {"ph": "M", "pid": rank, "tid": row, "name": "thread_sort_index", "args": {"sort_index": row}}

        def event(row, name, begin, end, rank=rank, **details):
            times = {"ts": (begin - start) / 1e3, "dur": max(0, end - begin) / 1e3}
            return {"ph": "X", "pid": rank, "tid": row, "name": name, **times, "args": details}

        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield from named(_SCRIPT, "script")
        steps = 0
        for span in recording.spans:
            steps += span.what == STEP
            name = f"step {steps}" if span.what == STEP else span.what
            yield event(_SCRIPT, name, span.begin, span.end)
        for number, device in enumerate(recording.devices):
            row = _DEVICE * (number + 1)
            yield from named(row, device)
            yield from named(row + _LAUNCHES, f"{device}, launching")
            for one in recording.operators:
                if one.device == number and not exchanges.is_exchange(one.name):
                    yield event(row, one.name, one.begin, one.end)
            for span in recording.launches:
                if span.what == device:
                    yield event(row + _LAUNCHES, "launching", span.begin, span.end)
            passes = [one for one in recording.passes if one.device == device]
            if passes:
                yield from named(row + _LAYERS, f"{device}, SyncBatchNorm")
            for one in passes:
                what = f"{one.layer}, {one.direction}"
                yield event(row + _LAYERS, what, one.began, one.ended, call=one.call)
                for name, begin, end in (
                    ("waiting for other devices", one.came, one.complete),
                    ("exchange with other processes", one.complete, one.met),
                ):
                    if begin < end:
                        yield event(row + _LAYERS, name, begin, end)
        yield from _exchange_events(own, event, named, _DEVICE * (len(recording.devices) + 1))


def _exchange_events(found, event, named, first_row):
    """Each exchange in the first row that is free, since many keys are under way at the same time."""
    ends: list[int] = []
    for one in sorted((one for one in found if ", " not in one.what), key=lambda one: one.ready):
        lane = next((number for number, end in enumerate(ends) if end <= one.ready), len(ends))
        if lane == len(ends):
            ends.append(0)
            yield from named(first_row + lane, "exchange with processes")
        ends[lane] = one.end
        yield event(first_row + lane, one.what, one.ready, one.end)
        if one.ready < one.all_ready:
            yield event(first_row + lane, "waiting for a late process", one.ready, one.all_ready)
