"""What every store does for layers, metrics and checkpoints: sums and gatherings that are under way."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, Callable, Optional

import numpy as np

from ..environment import refuse_if_alone
from ..mxnet.compat import mx
from . import flight_recorder
from .gathering import Gathering, gathered, open_for_sums
from .handshake import SAME_VERSIONS, agree, spelled, version, words_of
from .protocols import Keys
from .reserved_keys import HANDSHAKE_WORDS
from .state import state_of
from .work import Work


class Contract:
    """What a store does beyond MXNet's ``broadcast`` and ``pushpull``; the defaults are built on these.

    What only some can do are the protocols of :mod:`.protocols`: a store that has their methods offers them.

    Attributes:
        type: its name.
        rank, num_workers: the number of this process, and how many take part.
        ranks: the number of each of its processes in the whole run, by which errors name them.
        sums: whether the sums of all processes come back.
        is_asynchronous: whether processes do not wait for each other: MXNet's servers take each gradient when it comes.
    """

    type: Any
    rank: Any
    num_workers: Any
    sums = True
    is_asynchronous: Any = False
    broadcast: Callable[..., None]
    pushpull: Callable[..., None]
    _number: Any = 0  # of the store, for the flight recorder

    def _open(self, library: str, number: int = 0) -> None:
        """Begin as process `rank` of `num_workers`, which are set: record exchanges, compare versions; collective.

        Args:
            library: what connects the processes, for the error where it sees this one alone.
            number: of the store, among those of this process whose keys would be taken for each other's.
        """
        refuse_if_alone(self.type, self.num_workers, library)
        flight_recorder.start(self.rank, self.num_workers)
        self._number, self._exchanges = number, flight_recorder.StoreRecords(number)
        agree(self, [version()], SAME_VERSIONS)
        if self.sums and self.num_workers > 1:
            flight_recorder.move_to_shared_memory(
                lambda text: [spelled(row) for row in gathered(self, HANDSHAKE_WORDS, words_of(text))]
            )

    @property
    def library(self) -> str:
        """What carries the sums, for people."""
        return str(self.type)

    @functools.cached_property
    def ranks(self) -> Sequence[int]:
        return range(self.num_workers)

    def plan(
        self,
        keys: Keys,
        values: Sequence[Any],
        outs: Optional[Sequence[Any]] = None,
        priorities: Optional[Sequence[int]] = None,
    ) -> Plan:
        """What sums these arrays step after step: its ``push()`` starts all sums.

        Args:
            keys, values, outs: as of ``pushpull``; row_sparse arrays too if the store offers :class:`.SparseSums`.
            priorities: for each key; by default 0, -1, -2 and so on, as MXNet's Trainer has them.

        Raises:
            SparseUnsupported, ArrayMismatch: as ``pushpull``, of a store that finds out now.
        """
        return Plan(self, keys, values, outs, priorities)

    def check(self) -> None:
        """Raise what has ended the exchanges of this process, if the store knows of anything."""

    def describe(self, key: Hashable, text: str) -> None:
        """Name the layer or parameter of a key, for the flight recorder; before the key is used."""
        flight_recorder.RECORDER.describe(self._number, key, text)

    def start_gather(self, key: Hashable, vector: np.ndarray) -> Gathering:
        """Start to gather the `vector` of every process, of any dtype, through a sum."""
        return Gathering(self, key, vector)

    def start_sum(self, key: Hashable, array: Any) -> Work:
        """Start to replace a float32 `array` on the CPU by its sum over the processes; nothing is compared."""
        work = Work(self, key, array)
        with state_of(self).lock:  # stores are made for one thread; the call returns before the exchange happens
            self._start_sum(key, array)
        work.begin()
        return work

    def _start_sum(self, key: Hashable, array: Any) -> None:
        """:meth:`start_sum` of that array."""
        self.pushpull(key, array, out=array)


class Plan:
    """Sums of the same arrays, step after step; made by :meth:`Contract.plan`.

    It serves these arrays and its `store`, a KVStore, also after a loss or a change of compression.
    """

    def __init__(
        self,
        contract: Contract,
        keys: Keys,
        values: Sequence[Any],
        outs: Optional[Sequence[Any]],
        priorities: Optional[Sequence[int]],
    ) -> None:
        self.store: Any = getattr(contract, "wrapped", contract)
        priorities = [-number for number in range(len(keys))] if priorities is None else priorities
        self._sums = list(zip(keys, values, [None] * len(keys) if outs is None else outs, priorities))

    def push(self) -> None:
        """Start all sums, which begin when their arrays are ready; returns at once, unless arrays are row_sparse.

        Raises:
            WorkerLost, WorkersDiffer: an earlier exchange has failed. A later failure is raised where an array is
                waited for.
        """
        for key, value, out, priority in self._sums:
            self.store.pushpull(key, value, out=out, priority=priority)


class Foreign(Contract):
    """A store of another library or of MXNet for the processes that it connects; no name of its keys is recorded."""

    _number = "of another library"

    def __init__(self, store: Any) -> None:
        self.wrapped = store
        self.type = getattr(store, "type", None)
        self.is_asynchronous = "async" in str(self.type)
        self.rank, self.num_workers = getattr(store, "rank", 0), getattr(store, "num_workers", 1)
        # Its own functions, without one around them in every step; one of an asynchronous kind may have neither.
        vars(self).update({name: getattr(store, name) for name in ("broadcast", "pushpull") if hasattr(store, name)})

    def _start_sum(self, key: Hashable, array: Any) -> None:
        open_for_sums(self, key, array.zeros_like())
        super()._start_sum(key, array)


class Alone(Foreign):
    """This process alone: a store of one process, a name, or None."""

    def allgather(self, key: Hashable, value: Any, out: Any, priority: int = 0) -> None:
        """As of :class:`.Hooks`."""
        value.expand_dims(0).copyto(out)


def contract(store: Any) -> Contract:
    """The :class:`Contract` of any KVStore; None, or a name, stands for this process alone.

    Example:
        >>> contract(None).num_workers, contract(mx.kv.create("local")).ranks
        (1, range(0, 1))
    """
    if isinstance(store, Contract):
        return store
    return Alone(store) if getattr(store, "num_workers", 1) == 1 else Foreign(store)


def is_ours(store: Any) -> bool:
    """Whether this package implements the store, so that its own counts and comparisons can travel through it."""
    return isinstance(store, Contract) and not isinstance(store, Foreign)


def is_mxnets(store: Any) -> bool:
    """Whether it is a store of MXNet's for the devices of one process."""
    return isinstance(store, mx.kv.KVStore) and "dist" not in store.type


def adds_up_copies(store: Any) -> bool:
    """Whether it is a store of MXNet's that adds up the copies on devices of one process, as :class:`.CopySums`."""
    return is_mxnets(store) and store.type in ("local", "device")


def is_distributed(store: Any) -> bool:
    """Whether a trainer's store, its name, or None, meets other processes."""
    return contract(store).num_workers > 1
