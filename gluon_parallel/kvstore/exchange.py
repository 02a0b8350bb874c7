"""Exchange of SyncBatchNorm's statistics between processes, call by call, through any KVStore."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from .. import native
from ..errors import BarrierTimeout, ExchangeError, WorkerLost, WorkersDiffer
from ..mxnet.compat import mx
from ..native.records import C, address_of
from .contract import contract
from .gathering import gathered, prepare_gather
from .protocols import Vectors, offers
from .state import state_of
from .work import name_of, wait_until

HEADER = C.HEADER  # [1, call number], before the vector in each message: how many processes it is from, and their call
_OUT_OF_STEP = "Each must run this layer equally often; after an error in one of them, restart all"
_created = functools.cache(lambda name: mx.kv.create(name))  # looked up at the call: it is replaced


def open_store(kvstore: Any) -> Any:
    """The KVStore of that name (one per process and name: layers share its connections), or the one handed over.

    Args:
        kvstore: a name such as ``"dist_sync"``, or anything with `KVStoreBase`'s ``broadcast``, ``pushpull``,
            ``rank`` and ``num_workers``.

    Example:
        >>> open_store("local").num_workers
        1
    """
    return _created(kvstore) if isinstance(kvstore, str) else kvstore


class StatisticsExchange:
    """All processes hand in a vector of one length and get all of them combined, call by call.

    They are combined in float64; sums of means and squares inside the store would lose what they are meant to keep.
    Build and prepare exchanges in the same order in every process.

    Args:
        store: a KVStore that sums over processes, see :func:`open_store`.
        name: whom the errors name.
        timeout: seconds to wait for the other processes at each call; the store ``mpi`` has a limit of its own.
        key: of an exchange that is built again; by default a new one.

    Example:
        >>> exchange = StatisticsExchange(open_store("local"), "layer")
        >>> exchange.prepare(2)
        >>> exchange.combine(0, np.array([1.5, 2.0]), direction=1)
        array([1.5, 2. ])
    """

    def __init__(self, store: Any, name: str, timeout: float = 120.0, key: Hashable = None) -> None:
        self.store, self._contract = store, contract(store)
        self._vectors: Any = store if offers(store, Vectors) else None
        self.name = name
        self.timeout = timeout
        self._key = next(state_of(self._contract).new_keys) if key is None else key
        if key is None and self._vectors is not None:  # else another one may use it
            weakref.finalize(self, self._vectors.end_of_gather(self._key)).atexit = False
        self._contract.describe(self._key, name)
        self.shared_gather = None  # where vectors go through shared memory, which the C library can do as well
        self._begun, self._lock = (0, -1), threading.Lock()
        self._sent: dict[int, dict[int, np.ndarray]] = {}  # call -> rank -> its row, where calls came in other orders
        self._matching = threading.Condition()

    def prepare(self, length: int) -> None:
        """Tell the store about this key, once; collective over the processes. Done before any call is in flight."""
        prepare_gather(self._contract, self._key, HEADER + length)

    def combine(self, call: int, vector: np.ndarray, direction: int, has_begun: bool = False) -> np.ndarray:
        """Send `vector`, (length,) float64, and get those of all processes combined, with the same bits everywhere.

        Args:
            call: a number that must be the same in all processes, to notice when they are out of step.
            direction: 0 for (count, mean, squared deviations) of each channel, 1 for sums; see :func:`combine`.
            has_begun: the C library has sent it through :attr:`shared_gather`, and waits no longer.

        Raises:
            BarrierTimeout: another process did not send its part in time.
            ExchangeError: what came back is not what was sent, or the processes are at different calls.
        """
        message = np.concatenate([(1.0, call), vector])
        header = self._contract.num_workers, call  # of each process's message, once
        if self.shared_gather is None and self._vectors is not None:
            self.shared_gather = self._vectors.shared_gather(self._key, message)
        shared = self.shared_gather
        if shared is not None:
            rows = self._named(call, shared.gather, message, has_begun)
        else:
            with self._lock:
                self._begun = self._begun[0] + 1, call
                key: Hashable = self._key
                if self._vectors is not None:
                    result = self._named(call, self._vectors.reduce, key, message, direction)
                    if (result[0], result[1]) == header:
                        return result[HEADER:]
                    key = f"{key} calls"
                rows = self._named(call, gathered, self._contract, key, message, self.timeout)
        result = combine(rows, direction, messages=True)
        if (result[0], result[1]) == header:
            return result[HEADER:]
        # Forward passes follow each other, because they write the running statistics; backward passes need not.
        if direction and (rows[:, 0] == 1).all() and not (rows[:, 1] == call).all():
            with shared.left_to_others() if shared and has_begun else contextlib.nullcontext():
                rows = self._match(call, rows)
        self._check(rows, call)
        return combine(rows[:, HEADER:], direction)

    def _match(self, call: int, rows: np.ndarray) -> np.ndarray:
        """The rows of `call`, where processes have sent those of different calls: the rest come with other calls here.

        ExchangeError: the others do not come to that call in time.
        """
        with self._matching:
            for rank, row in enumerate(rows):
                self._sent.setdefault(int(row[1]), {})[rank] = row
            self._matching.notify_all()

            def have_come(seconds: float) -> bool:
                self._contract.check()
                return self._matching.wait_for(lambda: len(self._sent[call]) == len(rows), seconds)

            ours = self._contract
            missing = [ours.ranks[rank] for rank in range(len(rows)) if rank not in self._sent[call]]
            wait_until(
                have_come,
                self.timeout,
                lambda: (self._calls(rows), name_of(ours)),
                _OUT_OF_STEP,
                missing,
                ExchangeError,
            )
            return np.stack([row for _, row in sorted(self._sent.pop(call).items())])

    def begun(self) -> tuple[int, int]:
        """How many calls of :meth:`combine`, or of the C library in its place, have begun here; the last one's number.

        A process begins the next call of an exchange when the one before has ended.
        """
        if self.shared_gather is None:
            return self._begun
        number, message = self.shared_gather.last()
        return number, -1 if message is None else int(message[1])

    def _named(self, call: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call it; errors name this exchange."""
        try:
            return function(*arguments)
        except (BarrierTimeout, ExchangeError, WorkerLost, WorkersDiffer) as error:
            raise type(error)(f"{self.name}, call {call}: {error}") from None

    def _check(self, rows: np.ndarray, call: int) -> None:
        if not (rows[:, 1] == call).all():
            raise ExchangeError(f"{self._calls(rows)}. {_OUT_OF_STEP}")

    def _calls(self, rows: np.ndarray) -> str:
        calls = ", ".join(f"process {rank} at call {row[1]:g}" for rank, row in zip(self._contract.ranks, rows))
        return f"{self.name}: the processes are out of step: {calls}"


def combine(rows: np.ndarray, direction: int, messages: bool = False) -> np.ndarray:
    """Combine rows of moments in the forward pass (direction 0), of sums in the backward pass (1): (length,) float64.

    Args:
        rows: (num, length) float64, one row for each device or process.
        messages: whether the rows have headers, which are combined as well.
    """
    rows, (num, length) = np.ascontiguousarray(rows, np.float64), rows.shape
    result = np.empty(length)
    (_messages if messages else _statistics)(address_of(rows), num, length, direction, address_of(result))
    return result


_statistics = native.function("gp_combine_statistics", 5, keeps_lock=True)
_messages = native.function("gp_combine_messages", 5, keeps_lock=True)
