"""Interface that layers, metrics and checkpoints require of a store, with defaults that are built on sums."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Callable, Optional

import numpy as np

from ..errors import BarrierTimeout, WorkerLost
from ..mxnet.compat import mx
from . import flight_recorder
from .environment import default_timeout, refuse_if_alone
from .handshake import SAME_MODEL, SAME_VERSIONS, described, differ, leave_without_waiting, spelled, version, words_of
from .reserved_keys import FIRST_EXCHANGE, HANDSHAKE_DIGEST, HANDSHAKE_WORDS
from .work import Gathering, Work

Keys = Sequence[Hashable]
Arrays = Sequence[Sequence[Any]]  # for each key, one NDArray per device
Bounds = Sequence[Sequence[int]]  # for each key, where the parts of the processes begin, and the end


class Contract:
    """What a store may offer beyond MXNet's ``broadcast`` and ``pushpull``; the defaults serve every store.

    Attributes:
        type: its name.
        rank, num_workers: the number of this process, and how many take part.
        ranks: the number of each of its processes in the whole run, by which errors name them.
        has_groups: whether :meth:`part` makes stores of a part of the processes.
        reduces: whether :meth:`reduce` combines statistics of processes on their way.
        gathers_parts: whether there are :meth:`sum_parts` and :meth:`gather_parts`.
        compresses: whether ``pushpull`` sums compressed gradients.
        sums_rows: whether it sums row_sparse arrays.
        takes_hooks: whether it has what communication hooks need: ``allgather``, and a sum under any new key.
        survival: of the training that goes on after a loss, see :mod:`.collective`; None: there is none.
    """

    type: Any
    rank: Any
    num_workers: Any
    has_groups = reduces = gathers_parts = compresses = sums_rows = takes_hooks = False
    survival: Any = None
    broadcast: Callable[..., None]
    pushpull: Callable[..., None]
    _number: Any = 0  # of the store, for the flight recorder
    _sums = True  # whether the sums of all processes come back

    def _open(self, library: str, number: int = 0) -> None:
        """Begin as process `rank` of `num_workers`, which are set: record exchanges, compare versions; collective.

        Args:
            library: what connects the processes, for the error where it sees this one alone.
            number: of the store, among those of this process whose keys would be taken for each other's.
        """
        refuse_if_alone(self.type, self.num_workers, library)
        flight_recorder.start(self.rank, self.num_workers)
        self._number, self._exchanges = number, flight_recorder.StoreRecords(number)
        self.agree([version()], SAME_VERSIONS)
        if self._sums and self.num_workers > 1:
            flight_recorder.move_to_shared_memory(
                lambda text: [spelled(row) for row in self.gather(HANDSHAKE_WORDS, words_of(text))]
            )

    @property
    def is_asynchronous(self) -> bool:
        """Whether processes do not wait for each other: MXNet's servers take each gradient when it comes."""
        return "async" in str(self.type)

    @property
    def library(self) -> str:
        """What carries the sums, for people."""
        return str(self.type)

    def residuals(self, trainer: Any) -> dict[Hashable, np.ndarray]:
        """{key: (n,) array}: what compression left out of a trainer's sums in this process, with nothing under way."""
        return {}

    def set_residuals(self, residuals: dict[Hashable, np.ndarray], trainer: Any) -> None:
        """Go on from what :meth:`residuals` returned, here or in another process; keys without one begin anew."""

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
            keys, values, outs: as of ``pushpull``; row_sparse arrays too if the store sums them.
            priorities: for each key; by default 0, -1, -2 and so on, as MXNet's Trainer has them.

        Raises:
            SparseUnsupported, ArrayMismatch: as ``pushpull``, of a store that finds out now.
        """
        return Plan(self, keys, values, outs, priorities)

    def summing_for(self, trainer: Any) -> contextlib.AbstractContextManager[Any]:
        """Within this block, sums are of this trainer's gradients, which it may have asked to compress."""
        return contextlib.nullcontext()

    def check(self) -> None:
        """Raise what has ended the exchanges of this process, if the store knows of anything."""

    def describe(self, key: Hashable, text: str) -> None:
        """Name the layer or parameter of a key, for the flight recorder; before the key is used."""
        flight_recorder.RECORDER.describe(self._number, key, text)

    @functools.cached_property
    def _agreed(self) -> set[str]:
        return set()  # what all processes send under a key, in words

    def compare(self, keys: Keys, arrays: Sequence[Any]) -> None:
        """Raise WorkersDiffer on all processes if one is about to send other arrays under these keys; all call it."""
        self._agree_to_send(described(keys, arrays))

    def compare_once(self, keys: Keys, arrays: Sequence[Any], parts: Sequence[Any] = ()) -> None:
        """The same, if that has not been compared before; `parts`: how each array is divided among the processes."""
        words = described(keys, arrays)
        words = [f"{word} in parts {[*ends]}" for word, ends in zip(words, parts)] or words
        if not self._agreed.issuperset(words):
            self._agree_to_send(words)

    def _agree_to_send(self, words: Sequence[str]) -> None:
        self.agree(words, SAME_MODEL)
        self._agreed.update(words)

    def agree(self, says: Sequence[str], advice: str) -> None:
        """Go on only if all processes say the same sentences; all call this equally often and in the same order.

        Each process sends 64 bits of a digest of its sentences. Only if they differ, the sentences themselves travel.

        Args:
            says: what this process does, each beginning with a verb, such as "run MXNet 1.9.1".
            advice: what to do where processes differ.

        Raises:
            WorkersDiffer: another process says something else; names who says what.
            WorkerLost: another process does not call it within ``GLUON_PARALLEL_TIMEOUT``.
        """
        digest = hashlib.sha256("; ".join(says).encode()).digest()[:8]
        if self.num_workers == 1 or self._all_say(HANDSHAKE_DIGEST, np.frombuffer(digest, np.uint8), says):
            return
        # All know by now that they differ, so all go through their sentences until they come to where.
        end = f"{says[0].partition(' ')[0] if says else 'say'} nothing more"
        for sentence in itertools.chain(says, itertools.repeat(end)):
            self._all_say(HANDSHAKE_WORDS, words_of(sentence), says, f"store {self.type!r}", advice)

    def _all_say(self, key: int, numbers: np.ndarray, says: Sequence[str], where: str = "", advice: str = "") -> bool:
        """Whether all processes send the same numbers; if they are `where` words, WorkersDiffer where they do not."""
        said = f"store {self.type!r}, {says[0] if says else 'nothing'}"
        rows = self._gathered(key, numbers, default_timeout(), said)
        is_same = (rows == rows[0]).all()
        if where and not is_same:
            raise differ(where, dict(zip(self.ranks, map(spelled, rows))), advice)
        return is_same

    def prepare_gather(self, key: Hashable, length: int) -> None:
        """Before the first :meth:`gather` of `length` numbers; all processes call it while nothing is in flight."""
        self._open_for_sums(key, mx.nd.zeros((self.num_workers, 4 * length), ctx=mx.cpu()))  # in pieces of 16 bits

    def _open_for_sums(self, key: Hashable, zeros: Any) -> None:
        """Make a key known to the servers of a store that has some, once."""
        state = state_of(self)
        if key in state.opened:  # without the lock: another thread may hold it in the middle of an exchange
            return
        with state.lock:
            if key not in state.opened:
                work = Work(self, key, zeros)
                self.broadcast(key, value=zeros, out=zeros)
                work.begin()
                work.wait(default_timeout(), "Every process must open the same keys", kind=BarrierTimeout)
                zeros.wait_to_read()
                state.opened.add(key)

    def gather(self, key: Hashable, vector: np.ndarray, timeout: Optional[float] = None) -> np.ndarray:
        """Every process's `vector`, (n,) float64, by rank; waits for all.

        Raises:
            BarrierTimeout, WorkerLost: another process did not send its part within `timeout` seconds, or the store's
                own limit.
            ExchangeError: what came back is not what was sent.
        """
        limit = default_timeout() if timeout is None else timeout
        return self._gathered(key, vector, limit, kind=BarrierTimeout)

    def _gathered(
        self, key: Hashable, vector: np.ndarray, limit: float, where: str = "", kind: type[Exception] = WorkerLost
    ) -> np.ndarray:
        """:meth:`gather` of a vector of any dtype; the last arguments are those of :meth:`.Work.wait`."""
        work = self.start_gather(key, vector)
        try:
            work.wait(limit, "Every process must run the same program, in one order; look at their output", where, kind)
        except WorkerLost:
            leave_without_waiting()
            raise
        return work.rows()

    def start_gather(self, key: Hashable, vector: np.ndarray) -> Gathering:
        """Start a :meth:`gather` through a sum, of a vector of any dtype."""
        work = Gathering(self, key, vector)
        self._begin(key, work)
        return work

    def start_sum(self, key: Hashable, array: Any) -> Work:
        """Start to replace a float32 `array` on the CPU by its sum over the processes; nothing is compared."""
        work = Work(self, key, array)
        self._begin(key, work)
        return work

    def _begin(self, key: Hashable, work: Work) -> None:
        with state_of(self).lock:  # stores are made for one thread; the call returns before the exchange happens
            self._start_sum(key, work.array)
        work.begin()

    def _start_sum(self, key: Hashable, array: Any) -> None:
        """:meth:`start_sum` of that array."""
        self.pushpull(key, array, out=array)

    def end_of_gather(self, key: Hashable) -> Callable[[], object]:
        """The function that notes that this process gathers at that key no more.

        The garbage collector may call it at any time, also after a loss, when the key is another exchange's.
        """
        return _nothing

    def shared_gather(self, key: Hashable, vector: np.ndarray) -> Any:
        """Where :meth:`gather` goes through shared memory, for the C library; None if it does not."""

    def reduce(self, key: Hashable, message: np.ndarray, direction: int) -> np.ndarray:
        """The messages of all processes, (n,) float64, combined by :func:`.combine`, of a store that `reduces`."""
        raise NotImplementedError

    def sum_parts(self, keys: Keys, arrays: Arrays, bounds: Bounds, whole: bool = False) -> None:
        """Of each array, every process gets its part of the sum over all devices and processes (reduce-scatter).

        The other values are undefined afterwards, unless `whole`. A store that `gathers_parts` has it. Values are added
        up in the order of ``pushpull``.

        Args:
            keys: of parameters, the same in the same order on all processes; what is ready earlier comes earlier.
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
    """A store of another program, or of MXNet; or None, or a name, which is this process alone."""

    compresses = True  # or says that it does not

    def __init__(self, store: Any) -> None:
        self.store = store
        self.type = getattr(store, "type", None)
        self.rank, self.num_workers = getattr(store, "rank", 0), getattr(store, "num_workers", 1)
        # Its own functions, without one around them in every step; one of an asynchronous kind may have neither.
        vars(self).update({name: getattr(store, name) for name in ("broadcast", "pushpull") if hasattr(store, name)})
        self.takes_hooks = self.num_workers == 1  # nothing is exchanged then
        self.sums_rows = store is None or isinstance(store, (str, mx.kv.KVStore))

    def describe(self, key: Hashable, text: str) -> None:
        """Nothing: what it exchanges is not recorded."""

    def compare(self, keys: Keys, arrays: Sequence[Any]) -> None:
        """Nothing: it may not be able to sum."""

    def _start_sum(self, key: Hashable, array: Any) -> None:
        self._open_for_sums(key, array.zeros_like())
        super()._start_sum(key, array)


def _nothing() -> None:
    """At the end of a gathering of a store that keeps nothing for it."""


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
    """What is known of a store, whoever uses it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.opened: set = set()  # keys
        self.new_keys = itertools.count(FIRST_EXCHANGE)  # in the program's order: the same ones in every process
        self.keys: dict[int, int] = {}  # length of a vector -> the key of functions that gather such ones
        self.sync_groups: dict = {}  # kind of sync group -> the store of this process's, see :mod:`.groups`


_lock = threading.Lock()
_states: weakref.WeakKeyDictionary[Any, _State] = weakref.WeakKeyDictionary()


def state_of(store: Any) -> _State:
    with _lock:
        return _states.setdefault(store.store if isinstance(store, _Foreign) else store, _State())


def forget(store: Any) -> None:
    """Number keys and make sync groups anew, after a loss; exchanges over this store are built again."""
    with _lock:
        _states.pop(store, None)
