"""MXNet's profiler, kept from what would end the process while it runs."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .compat import mx

NUM_CPUS = len(os.sched_getaffinity(0))  # CPU devices of MXNet's profiler; two kinds of memory follow them
_NUM_PLACES = NUM_CPUS + 2


def has_place_for(device: mx.Context) -> bool:
    """Whether MXNet's profiler has a place for the device; it has none for CPU devices far beyond the cores."""
    return device.device_type != "cpu" or device.device_id < _NUM_PLACES


@contextlib.contextmanager
def configured(**settings: bool) -> Iterator[Path]:
    """Within this block MXNet's profiler can run, on devices that it has a place for; yields the file that it writes.

    An operator on another device would end the process, also the one that frees an array. So arrays on such devices,
    and the graphs that may have some, live until the block ends. Statistics are added up, also where nobody reads them,
    for then the engine runs operators one by one, and each has its name.

    Args:
        settings: of ``mx.profiler.set_config``. Calls of the C API are never recorded: a thread that is in one when the
            profiler starts, such as one that frees an array, would end the process as it leaves it.
    """
    gc.collect()  # an earlier net, say, whose arrays would be freed within the block
    mx.nd.waitall()
    kept = _without_place()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        always = {"filename": str(path), "profile_api": False, "continuous_dump": False}
        mx.profiler.set_config(aggregate_stats=True, **settings, **always)
        try:
            yield path
        finally:
            mx.profiler.set_state("stop")
            mx.profiler.dumps(reset=True)  # forget what was recorded
            mx.profiler.set_config(aggregate_stats=False, profile_memory=False, **always)
            del kept


def _without_place() -> list[object]:
    """The arrays on devices that MXNet's profiler has no place for, and all graphs if there are such arrays."""
    known = gc.get_objects()
    arrays: list[object] = [one for one in known if issubclass(type(one), mx.nd.NDArray) and _is_without_place(one)]
    graphs = mx.nd._internal.CachedOp, mx.executor.Executor
    return [*arrays, *(one for one in known if issubclass(type(one), graphs))] if arrays else []


def _is_without_place(array: mx.nd.NDArray) -> bool:
    if getattr(array, "handle", None) is None:  # another thread is making it
        return False
    try:
        return not has_place_for(array.ctx)
    except KeyError:  # it has no device yet
        return False
