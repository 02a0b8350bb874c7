"""Warning for processes that were started as a group and train without each other: names what works without a store."""

import os
import sys
from typing import Any, Optional

from ..environment import launched_group, taken_by
from ..errors import SeparateTraining, warn
from ..forks import at_exit
from ..mxnet.compat import mx
from .contract import is_distributed

_STEPS = 3  # backward passes before the warning: by then trainer, sampler and layers have been made
_OTHERS = ("horovod.mxnet", "horovod.torch", "mpi4py.MPI")  # libraries by which a script may connect processes itself
WHOLE_DATA = (
    "(gp.sampler.BatchSampler, gp.datasets.batches) gives every process all of the data (write rank=store.rank, "
    "num_workers=store.num_workers)"
)


class _Uses:
    """Which parts of this process's program got a store that meets the other processes."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}  # what has none -> what to write
        self.connected: set[str] = set()
        self.opened = False  # whether a store that meets other processes was made
        self.is_left_alone = False  # whether all other processes are lost
        self.num_backward = 0
        self.told: Optional[set[str]] = None  # what was named in warnings so far; None before the first


_uses = _Uses()


def note(what: str, connected: bool, remedy: str, each: bool = False) -> None:
    """Record whether a part of the program, such as ``"gluon.Trainer"``, was given a store of several processes.

    `remedy` says what it does without one, and what to write. With `each`, every single one must be connected;
    otherwise one is enough, and others may be meant for this process.
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
    _uses.opened = _uses.opened or is_distributed(store)
    return store


def note_losses(num_left: int) -> None:
    """Record how many processes of the group are left: one process alone trains and evaluates everything there is."""
    _uses.is_left_alone = num_left == 1


def note_child() -> None:
    """Warn if this process takes no part in a group, because one that it is a fork or a child of does."""
    if (process := taken_by()) is not None:
        _warn(
            f"this process is a fork or a child of process {process}, which has taken its rank in a group of "
            "processes. So this one is alone: what it trains or evaluates, it does on all of its data"
        )


def _tell() -> None:
    """Warn of what is missing and has not been named yet."""
    ours, before = launched_group(), _uses.told
    if ours is not None and "GLUON_PARALLEL_RANK" in os.environ:  # which starts its processes by one of the others
        ours = ours._replace(starter="gluon-parallel launch", variable="GLUON_PARALLEL_NUM_WORKERS")
    _uses.told = set() if before is None else before
    # Where the environment tells the number, process 0 warns for all.
    if ours is None or ours.rank != 0 or _uses.is_left_alone:
        return
    if not _uses.opened:
        if before is None and not any(name in sys.modules for name in _OTHERS):
            _warn(
                f"{ours.starter} started this process as one of {ours.num_workers} ({ours.variable}="
                f"{ours.num_workers}), but the script has opened no store: each process trains a model of its own, on "
                "all of the data. gp.prepare connects net, trainer and loaders; or write store = "
                'gp.kvstore.create("auto"), and hand it over: gluon.Trainer(..., kvstore=store), '
                "gp.sampler.BatchSampler(..., rank=store.rank, num_workers=store.num_workers), gp.evaluate(..., store)",
            )
        return
    missing = {what: remedy for what, remedy in _uses.missing.items() if what not in _uses.told}
    _uses.told.update(missing)
    if missing:
        items = "; ".join(f"{what} {remedy}" for what, remedy in missing.items())
        _warn(
            f"this is one process of {ours.num_workers} (started by {ours.starter}), and its store is not used "
            f"everywhere: {items}",
        )


def _warn(text: str) -> None:
    silence = "import warnings; warnings.filterwarnings('ignore', category=gp.errors.SeparateTraining)"
    warn(f"{text}. Where this is meant: {silence}", SeparateTraining)


def count_backward(backward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a backward pass, and count it; the third one warns, and later ones are MXNet's own."""
    if _uses.num_backward < _STEPS:
        _uses.num_backward += 1
        if _uses.num_backward == _STEPS:
            _tell()
    else:
        for owner in (mx.autograd, mx.nd.NDArray):
            if getattr(owner.backward, "wrapper", None) is count_backward:
                owner.backward = owner.backward.__wrapped__
    return backward(*args, **kwargs)


if launched_group() is not None:
    at_exit(lambda: _tell() if 0 < _uses.num_backward < _STEPS else None)  # a script of one or two steps
