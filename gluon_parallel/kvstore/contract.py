"""Interface that layers, metrics and checkpoints require of a store, with defaults that are built on sums."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Callable, Optional

import numpy as np

from ..compat import mx
from ..errors import BarrierTimeout
from . import flight_recorder
from .environment import arrives, default_timeout

_PIECES = 4  # of a number

Keys = Sequence[Hashable]
Arrays = Sequence[Sequence[Any]]  # for each key, one NDArray per device
Bounds = Sequence[Sequence[int]]  # for each key, where the parts of the processes begin, and the end

_lock = threading.Lock()
_states: weakref.WeakKeyDictionary[Any, _State] = weakref.WeakKeyDictionary()


class Contract:
    """What a store may offer beyond MXNet's ``broadcast`` and ``pushpull``; the defaults serve every store.

    Attributes:
        type: its name.
        rank, num_workers: the number of this process, and how many take part.
        ranks: the number of each of its processes in the whole run, by which errors name them.
        has_groups: whether :meth:`part` makes stores of a part of the processes.
        reduces: whether :meth:`reduce` combines statistics of processes on their way.
        gathers_parts: whether there are :meth:`sum_parts` and :meth:`gather_parts`.
        survival: of the training that goes on after a loss, see :mod:`.collective`; None: there is none.
    """

    type: Any
    rank: Any
    num_workers: Any
    has_groups = reduces = gathers_parts = False
    survival: Any = None
    broadcast: Callable[..., None]
    pushpull: Callable[..., None]

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
            keys: numbers or names; all processes name the same ones.
            values: for each key an NDArray, or one NDArray per device; row_sparse ones too if the store sums them.
            outs: what becomes the sums, as in ``pushpull``; by default `values`.
            priorities: for each key; by default 0, -1, -2 and so on, as MXNet's Trainer has them.

        Raises:
            SparseUnsupported, ArrayMismatch: as ``pushpull``, of a store that finds out now.
        """
        return Plan(self, keys, values, outs, priorities)

    def check(self) -> None:
        """Raise what has ended the exchanges of this process, if the store knows of anything."""

    def describe(self, key: Hashable, text: str) -> None:
        """Name the layer or parameter of a key, for the flight recorder; before the key is used."""

    def compare(self, keys: Keys, arrays: Sequence[Any]) -> None:
        """Raise WorkersDiffer on all processes if one is about to send other arrays under these keys; all call it."""

    def prepare_gather(self, key: Hashable, length: int) -> None:
        """Before the first :meth:`gather` of `length` numbers; all processes call it while nothing is in flight."""
        state = _state_of(self)
        if key in state.opened:  # without the lock: another thread may hold it in the middle of an exchange
            return
        with state.lock:
            if key not in state.opened:
                zeros = mx.nd.zeros((self.num_workers, _PIECES * length), ctx=mx.cpu())
                self.broadcast(key, value=zeros, out=zeros)
                limit = default_timeout()
                if not arrives(zeros, limit):
                    words = flight_recorder.RECORDER.words_of_key(key)
                    raise BarrierTimeout(f"store {self.type!r}, {words}: it was not opened everywhere in {limit:g} s")
                zeros.wait_to_read()
                state.opened.add(key)

    def gather(self, key: Hashable, vector: np.ndarray, timeout: Optional[float] = None) -> np.ndarray:
        """Every process's `vector`, (n,) float64, by rank; waits for all.

        A store that sums gets the numbers as float32 pieces of 16 bits: MXNet's servers keep float64 as float32
        whenever a variable that they forget to set happens to be true.

        Raises:
            BarrierTimeout, WorkerLost: another process did not send its part within `timeout` seconds, or the store's
                own limit.
        """
        limit = default_timeout() if timeout is None else timeout

        def start(array: Any) -> None:
            with _state_of(self).lock:  # stores are made for one thread; the call returns before the exchange happens
                self.pushpull(key, array, out=array)

        pieces = gather_by_sum(self, start, vector.view(np.uint16), limit)
        if pieces is None:
            waited = f"process {self.rank} of {self.num_workers} waited {limit:g} s for the others"
            advice = flight_recorder.advice(
                "Every process must run the same layers in the same order for the same number of steps; look for an "
                "error in another process"
            )
            raise flight_recorder.gave_up(waited, advice, BarrierTimeout)
        return _whole(pieces)

    def shared_gather(self, key: Hashable, vector: np.ndarray) -> Any:
        """Where :meth:`gather` goes through shared memory, for the C library; None if it does not."""

    def reduce(self, key: Hashable, message: np.ndarray, direction: int) -> np.ndarray:
        """The messages of all processes combined, of a store that `reduces`: see :func:`.combine_messages`."""
        raise NotImplementedError

    def sum_parts(self, keys: Keys, arrays: Arrays, bounds: Bounds, whole: bool = False) -> None:
        """Of each array, every process gets its part of the sum over all devices and processes (reduce-scatter).

        The other values are undefined afterwards, unless `whole`. A store that `gathers_parts` has it. Values are added
        up in the order of ``pushpull``.

        Args:
            keys: those of the trainer's parameters. All processes name the same ones in the same order; arrays that
                are ready earlier come earlier.
            arrays: for each key, one NDArray per device, all of which get the sums.
            bounds: as of :meth:`gather_parts`.
            whole: every process gets the whole sums.
        """
        raise NotImplementedError

    def gather_parts(self, keys: Keys, arrays: Arrays, bounds: Bounds) -> None:
        """Each array, of which every process has a part, gets the parts of all, of a store that `gathers_parts`.

        Args:
            keys: as of :meth:`sum_parts`, whose arrays have the same shapes and dtypes.
            arrays: for each key, one NDArray per device. Of the first one's values, flat, those from ``bounds[rank]``
                to ``bounds[rank + 1]`` are this process's part.
            bounds: for each key (num_workers + 1) numbers, from 0 to the array's size.
        """
        raise NotImplementedError

    def part(self, members: Optional[Sequence[int]]) -> Any:
        """A store of the ranks `members`, or None where that is None, of a store that `has_groups`."""
        raise NotImplementedError


class Plan:
    """Sums of the same arrays, step after step; made by :meth:`Contract.plan`.

    It serves these arrays and this store, also after a loss or a change of compression. Where another array takes the
    place of one of them, or the trainer another store, make another plan.

    Attributes:
        store: the KVStore.
    """

    def __init__(
        self,
        contract: Contract,
        keys: Keys,
        values: Sequence[Any],
        outs: Optional[Sequence[Any]],
        priorities: Optional[Sequence[int]],
    ) -> None:
        self.store: Any = contract.store if isinstance(contract, _Foreign) else contract
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


class _Foreign(Contract):
    """A store of another program, or of MXNet; or None, which is this process alone."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.type = getattr(store, "type", None)
        self.rank, self.num_workers = getattr(store, "rank", 0), getattr(store, "num_workers", 1)
        if store is not None and not isinstance(store, str):
            self.broadcast, self.pushpull = store.broadcast, store.pushpull


def contract(store: Any) -> Contract:
    """The :class:`Contract` of any KVStore; None, or a name, stands for this process alone.

    Example:
        >>> contract(None).num_workers, contract(mx.kv.create("local")).ranks
        (1, range(0, 1))
    """
    return store if isinstance(store, Contract) else _Foreign(store)


def is_distributed(store: Any) -> bool:
    """Whether a trainer's store, its name, or None, meets other processes."""
    return contract(store).num_workers > 1


class _State:
    """What is known of a store that gathers by sums."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.opened: set = set()  # keys


def _state_of(store: Any) -> _State:
    with _lock:
        return _states.setdefault(store.store if isinstance(store, _Foreign) else store, _State())


def gather_by_sum(store: Any, start: Callable[[Any], None], numbers: np.ndarray, limit: float) -> Optional[np.ndarray]:
    """The `numbers` of every process through a store that may only be able to sum: each fills a row of its own.

    They are (n,), of at most 16 bits, which float32 holds exactly; ``start(array)`` starts to replace a float32 array
    on the CPU by its sum over the processes. Returns (num_workers, n) float32, or None after `limit` seconds.
    """
    rows = np.zeros((store.num_workers, len(numbers)), np.float32)
    rows[store.rank] = numbers
    array = mx.nd.array(rows, ctx=mx.cpu())
    start(array)
    return array.asnumpy() if arrives(array, limit) else None


def _whole(pieces: np.ndarray) -> np.ndarray:
    """Rows of float64 from rows of their pieces; what is no such piece, as when two were added up, becomes NaN.

    Example:
        >>> float(_whole(np.array([[0.1]]).view(np.uint16).astype(np.float32))[0, 0])
        0.1
    """
    right = (pieces >= 0) & (pieces < 1 << 16) & (pieces == np.floor(pieces))
    rows = np.where(right, pieces, 0).astype(np.uint16).view(np.float64)
    rows[~right.reshape(*rows.shape, _PIECES).all(axis=-1)] = np.nan
    return rows
