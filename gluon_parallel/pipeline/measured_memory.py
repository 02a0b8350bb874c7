"""Memory that a function needs on each device, as MXNet's profiler counts it."""

from __future__ import annotations

import gc
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

from ..compat import mx

# The counter of a device stops at 0, also where arrays from before are freed; so it starts that much above.
_BALLAST = 1 << 26  # bytes that nobody touches
_LATE = 0.1  # seconds in which MXNet has freed the arrays of operations that have ended
_TRIES = 20
_COUNTER = re.compile(r"^(Memory: .*?) +\d+ +[\d.]+ +([\d.]+) +[\d.]+$", re.MULTILINE)  # count, least, most, average


def peaks(devices: Sequence[mx.Context], function: Callable[[], object]) -> list[int | None]:
    """Call ``function()``, wait for all that it has launched, and return the memory that it needed on each device.

    That is how many bytes of arrays were there at most, beyond those that were there before. None for a CPU device that
    MXNet does not count (it knows as many as there are cores, and two more), and where other threads make arrays all
    the time. It uses MXNet's profiler, which must not be in use.

    Example:
        >>> peaks([mx.cpu(0)], lambda: mx.nd.zeros(1000) + mx.nd.zeros(1000))
        [12000]
    """
    gc.collect()  # an earlier net, say, whose arrays would be freed while these are counted
    mx.nd.waitall()
    time.sleep(_LATE)
    with tempfile.TemporaryDirectory() as folder:  # MXNet deletes and writes the file, though nobody asks for it
        file = str(Path(folder) / "profile.json")
        mx.profiler.set_config(profile_memory=True, aggregate_stats=True, continuous_dump=False, filename=file)
        try:
            found = [_start(device) for device in devices]
            mx.profiler.set_state("run")
            function()
            mx.nd.waitall()
            most = _read()
        finally:
            mx.profiler.set_state("stop")
            mx.profiler.dumps(reset=True)
            mx.profiler.set_config(profile_memory=False, aggregate_stats=False, continuous_dump=False, filename=file)
    return [one and max(0, round(most.get(one[0], one[1]) - one[1])) for one in found]


def _start(device: mx.Context) -> tuple[str, float, list[mx.nd.NDArray]] | None:
    """Begin to count a device's memory: its counter's name, its value in bytes, and the arrays that keep it above 0."""
    ballast: list[mx.nd.NDArray] = []  # of all tries, so that none is freed while it counts
    for _ in range(_TRIES):  # until nothing else changes, such as an array of the caller's that is freed late
        mx.profiler.set_state("run")
        try:
            ballast.append(mx.nd.empty(_BALLAST // 4, ctx=device))
        except mx.base.MXNetError:
            return None
        counters = _read()
        if len(counters) == 1:
            [(name, value)] = counters.items()
            return name, value, ballast
    return None


def _read() -> dict[str, float]:
    """Name of each counter that has changed, and the most that it has been, in bytes; they are forgotten then."""
    return {name: 1000 * float(value) for name, value in _COUNTER.findall(mx.profiler.dumps(reset=True))}
