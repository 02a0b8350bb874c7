"""Warning for processes that were started as a group and train without each other: names what works without a store."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import warnings
from typing import Any, Optional

from ..compat import mx
from ..errors import SeparateTraining
from .environment import LaunchedGroup, launched_group

_STEPS = 3  # backward passes before the warning: by then trainer, sampler and layers have been made
_RANKS = ("GLUON_PARALLEL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK", "SLURM_PROCID")
_OTHERS = ("horovod.mxnet", "horovod.torch", "mpi4py.MPI")  # libraries by which a script may connect processes itself
WHOLE_DATA = (
    "(gp.sampler.BatchSampler, gp.datasets.batches) gives every process all of the data (write rank=store.rank, "
    "num_workers=store.num_workers)"
)
_SILENCE = (
    "Where this is meant: import warnings; warnings.filterwarnings('ignore', category=gp.errors.SeparateTraining)"
)


class _Uses:
    """Which parts of this process's program got a store that meets the other processes."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}  # what has none -> what to write
        self.connected: set[str] = set()
        self.opened = False  # whether a store that meets other processes was made
        self.num_backward = 0
        self.told: Optional[set[str]] = None  # what was named in warnings so far; None before the first


_uses = _Uses()


def note(what: str, connected: bool, remedy: str, each: bool = False) -> None:
    """Record that a part of the program meets the other processes, or that it does not.

    Args:
        what: its name, such as ``"gluon.Trainer"``.
        connected: whether it was given a store of several processes (or a rank among them).
        remedy: what it does without one, and what to write.
        each: every single one must be connected; otherwise one is enough, and others may be meant for this process.
    """
    if connected:
        _uses.connected.add(what)
        if not each:
            _uses.missing.pop(what, None)
    elif each or what not in _uses.connected:
        _uses.missing[what] = remedy
        if _uses.told is not None:  # after the first steps, such as the first evaluation
            _tell()


def note_store(store: Any) -> Any:
    """Record that a store was made; returns it."""
    _uses.opened = _uses.opened or getattr(store, "num_workers", 1) > 1
    return store


def _count() -> None:
    _uses.num_backward += 1
    if _uses.num_backward == _STEPS:
        _tell()


def _tell() -> None:
    """Warn of what is missing and has not been named yet."""
    ours, before = _launched(launched_group()), _uses.told
    _uses.told = set() if before is None else before
    if ours is None or not _speaks():
        return
    if not _uses.opened:
        if before is None and not any(name in sys.modules for name in _OTHERS):
            warnings.warn(_nothing_opened(ours), SeparateTraining, stacklevel=4)
        return
    missing = {what: remedy for what, remedy in _uses.missing.items() if what not in _uses.told}
    _uses.told.update(missing)
    if missing:
        items = "; ".join(f"{what} {remedy}" for what, remedy in missing.items())
        warnings.warn(
            f"this is one process of {ours.num_workers} (started by {ours.starter}), and its store is not used "
            f"everywhere: {items}. {_SILENCE}",
            SeparateTraining,
            stacklevel=4,
        )


def _launched(ours: Optional[LaunchedGroup]) -> Optional[LaunchedGroup]:
    """The group by the name that its user knows: the launcher starts its processes by mpirun or a tracker."""
    if ours is None or "GLUON_PARALLEL_RANK" not in os.environ:
        return ours
    return ours._replace(starter="gluon-parallel launch", variable="GLUON_PARALLEL_NUM_WORKERS")


def _nothing_opened(ours: LaunchedGroup) -> str:
    return (
        f"{ours.starter} started this process as one of {ours.num_workers} ({ours.variable}={ours.num_workers}), but "
        "the script has opened no store: each process trains a model of its own, on all of the data. gp.prepare "
        'connects net, trainer and loaders; or write store = gp.kvstore.create("auto"), and hand it over: '
        "gluon.Trainer(..., kvstore=store), gp.sampler.BatchSampler(..., rank=store.rank, "
        f"num_workers=store.num_workers), gp.evaluate(..., store). {_SILENCE}"
    )


def _speaks() -> bool:
    """Whether this process is the one that warns: process 0, where the environment tells the number."""
    number = next((os.environ[name] for name in _RANKS if os.environ.get(name)), "0")
    return number == "0"


def watch() -> None:
    """Count backward passes, and warn after the third; in a process that was not started in a group do nothing."""
    if launched_group() is None:
        return

    def counted(function: Any) -> Any:
        @functools.wraps(function)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if _uses.num_backward < _STEPS:
                _count()
            return function(*args, **kwargs)

        return backward

    mx.autograd.backward = counted(mx.autograd.backward)
    mx.nd.NDArray.backward = counted(mx.nd.NDArray.backward)
    atexit.register(_at_exit)


def _at_exit() -> None:
    """A script of one or two steps is told at its end."""
    if 0 < _uses.num_backward < _STEPS:
        _tell()
