"""Groups: stores of some of the processes, for what only these exchange."""

import hashlib
from collections.abc import Iterable
from typing import Any, Optional, Union

import numpy as np

from ..errors import StoreUnavailable
from .collective import gather
from .contract import contract
from .factory import as_store
from .flight_recorder.ring import host
from .handshake import differ
from .protocols import Groups, offers
from .state import state_of

SyncGroups = Union[int, str, None]  # all processes; "host"; so many consecutive ones


def group(store: Any, ranks: Iterable[int]) -> Optional[Any]:
    """A store of some of the processes of `store`; all of its processes call it, in the same order.

    As with ``torch.distributed.new_group``, processes outside of the group call it too. They hand in the same `ranks`
    and get None; or the ranks of a group of their own, which is made at the same time, as by ``MPI_Comm_split``. An
    error in an exchange of a group also ends the store.

    Args:
        store: a KVStore of ``gp.kvstore.create``; or a group, whose processes are numbered from 0.
        ranks: numbers of processes in `store`; in the group they have their order.

    Returns:
        A store whose ``rank`` and ``num_workers`` are those of the group, and whose ``ranks`` are the numbers of its
        processes in the whole run, by which errors name them; None on a process that is not in `ranks`. A group of
        all processes is `store` itself.

    Raises:
        ValueError: a rank is out of range or listed twice, or `ranks` is empty.
        StoreUnavailable: the store has no groups: only ``mpi`` has some of several processes.
        WorkersDiffer: processes of one group name other ranks.
        WorkerLost, BarrierTimeout: a process has not called it.

    Example:
        >>> import gluon_parallel as gp
        >>> group(gp.kvstore.create("local"), [0]).num_workers
        1
    """
    store, ranks = as_store(store, "gp.kvstore.group"), list(ranks)
    num = store.num_workers
    for rank in ranks:
        if not (isinstance(rank, (int, np.integer)) and 0 <= rank < num):
            raise ValueError(f"gp.kvstore.group: there is no process {rank!r}; expected numbers from 0 to {num - 1}")
        if ranks.count(rank) > 1:
            raise ValueError(f"gp.kvstore.group: process {rank} is named twice in {ranks}; name each once")
    if not ranks:
        raise ValueError("gp.kvstore.group: no process is named; expected at least one")
    if len(ranks) < num and not offers(store, Groups):
        raise StoreUnavailable(_NO_GROUPS.format("gp.kvstore.group", store.type))
    mine = np.zeros(num)
    mine[ranks] = 1
    named = gather(store, "gp.kvstore.group()", mine)
    outer = contract(store).ranks
    for rank, row in enumerate(named):
        members = np.flatnonzero(row).tolist()
        if row[rank] and (named[members] != row).any():
            said = {outer[member]: f"name {np.flatnonzero(named[member]).tolist()}" for member in members}
            raise differ(f"store {store.type!r}, gp.kvstore.group()", said, "All of a group name the same")
    if named.all():
        return store
    return store.subgroup(np.flatnonzero(mine).tolist() if mine[store.rank] else None)


_NO_GROUPS = (
    "{}: the store {!r} sums over all processes or none, so it has no groups; take the store mpi "
    "(gluon-parallel launch --engine mpi)"
)


def check_sync_group(kind: SyncGroups, where: str) -> SyncGroups:
    """`kind`, which must be one of :func:`sync_group`'s; ValueError: it is something else, handed to `where`."""
    if kind is None or kind == "host":
        return kind
    if isinstance(kind, (int, np.integer)) and not isinstance(kind, bool) and kind >= 1:
        return kind
    raise ValueError(
        f"{where}: group={kind!r}; expected None (all processes), 'host' (those of each host), or how many consecutive "
        "processes are a group. For others give the store of a group: kvstore=gp.kvstore.group(store, ranks)"
    )


def sync_group(store: Any, kind: SyncGroups, where: str = "gp.kvstore.sync_group") -> Any:
    """The store of this process's sync group among the processes of `store`; all call it, in the same order.

    Args:
        store: a KVStore.
        kind: None: all processes; ``"host"``: those of each host; k: the first k, the next k, and so on.
        where: who asks, for errors.

    Returns:
        The store of the group, the same one at every call for this `store`.

    Raises:
        ValueError: k does not divide the number of processes, or `kind` is something else.
        StoreUnavailable: as :func:`group`.
    """
    num = store.num_workers
    if check_sync_group(kind, where) is None or num == 1:
        return store
    if kind != "host" and num % kind:
        divisors = ", ".join(str(k) for k in range(1, num + 1) if num % k == 0)
        raise ValueError(
            f"{where}: groups of {kind} cannot be made of {num} processes; {num} can be divided by {divisors}"
        )
    made = state_of(store).sync_groups
    if kind not in made:
        if kind != num and not offers(store, Groups):
            raise StoreUnavailable(_NO_GROUPS.format(f"{where}, group={kind!r}", store.type))
        made[kind] = group(store, _of_host(store) if kind == "host" else _consecutive(store.rank, kind))
    return made[kind]


def _consecutive(rank: int, num: Any) -> range:
    return range(rank // num * num, rank // num * num + num)


def _of_host(store: Any) -> list[int]:
    """The ranks of the processes that run on the host of this one."""
    mine = np.frombuffer(hashlib.sha256(host().encode()).digest(), np.uint32).astype(float)
    hosts = gather(store, "gp.kvstore.sync_group()", mine)
    return np.flatnonzero((hosts == mine).all(axis=1)).tolist()
