"""Operators in MXNet's engine, recorded by MXNet's own profiler."""

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path

from ...compat import mx
from ...errors import DeviceUnavailable
from . import exchanges
from .recording import Operator

# Bookkeeping, of the engine and ours.
_IGNORED = {"WaitForVar", "DeleteVariable", "DeleteOperator", "arrives", "gluon_parallel.flight_recorder"}


def _num_cpus():
    """How many CPU devices MXNet's profiler counts; two kinds of memory follow them."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def recorded(devices):
    """Record the operators of `devices` in this block, at whose begin and end all work must be done.

    Yields a list, filled with :class:`.Operator` in the order of their begins when the block ends. Refuses CPU devices
    for whose operators MXNet's profiler has no place.
    """
    beyond = [device for device in devices if device.device_type == "cpu" and device.device_id >= _num_cpus() + 2]
    if beyond:
        raise DeviceUnavailable(
            f"MXNet's profiler records cpu(0) to cpu({_num_cpus() + 1}) on this machine and would end the process at "
            f"an operator of {beyond[0]}; profile with fewer devices"
        )
    operators: list[Operator] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "operators.json"
        mx.profiler.set_config(
            filename=str(path), continuous_dump=False, profile_memory=False, profile_api=False,
            aggregate_stats=True,  # with it, the engine runs operators one by one, so that each has its name
        )  # fmt: skip
        before = _behind()
        mx.profiler.set_state("run")
        try:
            yield operators
        finally:
            mx.profiler.set_state("stop")
            behind = (before + _behind()) // 2  # the system's clock may be adjusted meanwhile
            mx.profiler.dump()
            operators += sorted(_read(path, devices, behind), key=lambda one: one.begin)
            mx.profiler.set_config(filename=str(path), continuous_dump=False, aggregate_stats=False)


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
        device.device_id + (_num_cpus() if device.device_type == "gpu" else 0): number
        for number, device in enumerate(devices)
    }
    begins: dict = {}
    for event in events:
        # MXNet's stores exchange on a device of their own, pinned memory, which is none of `devices`.
        device = 0 if exchanges.is_exchange(event["name"]) else numbers.get(event["pid"])
        if device is None or event["ph"] not in "BE" or event["name"] in _IGNORED:
            continue
        key = event["pid"], event["tid"]
        if event["ph"] == "B":
            begins[key] = event
        else:
            begin, end = (int(one["ts"]) * 1000 - behind for one in (begins.pop(key), event))
            yield Operator(device, event["name"], begin, end)
