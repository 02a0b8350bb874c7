"""Survival of lost processes: whether it is switched on, and the store of those that are left."""

from __future__ import annotations

from typing import Any

from ..errors import WorkerLost
from . import exchange, groups
from .environment import min_processes
from .mpi.regroup import regroup as regroup_mpi
from .mpi.store import MPI


def survives(store: Any) -> bool:
    """Whether the processes of `store` go on without those that are lost, as the launcher was asked to."""
    return isinstance(store, MPI) and store.num_workers > 1 and min_processes() is not None


def has_failed(store: MPI) -> bool:
    """Whether the exchanges of `store` have failed, for a lost process or for another reason."""
    try:
        store.check()
    except Exception:  # whatever it was has ended them all
        return True
    return False


def regroup(store: MPI) -> list[int]:
    """Have `store` meet the processes that are left; all of them call it, with nothing in flight.

    Its ``rank`` and ``num_workers`` are others then; ``ranks`` are still the numbers that the processes began with.

    Returns:
        The numbers of those that were lost.

    Raises:
        WorkerLost: fewer processes are left than shall go on, or what :func:`.mpi.regroup.regroup` raises.
    """
    before = list(store.ranks)
    progress = regroup_mpi(store._progress)
    lost = sorted({*before} - {*progress.ranks})
    store.take_part_in(progress)
    exchange.forget(store)
    groups.forget(store)
    least = min_processes()
    if least is not None and progress.size < least:
        names = ", ".join(map(str, lost))
        raise WorkerLost(f"process {names} was lost, and {progress.size} are left of the {least} that must go on")
    return lost
