"""Gathering of every process's vector through any KVStore, also one that can only sum."""

import collections
import functools
import itertools
import threading
import weakref

import numpy as np

from ..compat import mx
from ..errors import BarrierTimeout, ExchangeError, WorkerLost, WorkersDiffer
from . import flight_recorder
from .handshake import gather_by_sum
from .reserved_keys import FIRST_EXCHANGE

_PIECES = 4  # of a number
_HEADER = 2  # [1, call number]: who has filled its slot, and for which call

_lock = threading.Lock()
_keys: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # store -> _StoreKeys


@functools.cache
def _created(name):
    return mx.kv.create(name)


def open_store(kvstore):
    """The KVStore of that name (one per process and name: layers share its connections), or the one handed over.

    Args:
        kvstore: a name such as ``"dist_sync"``, or anything with `KVStoreBase`'s ``broadcast``, ``pushpull``,
            ``rank`` and ``num_workers``.

    Example:
        >>> open_store("local").num_workers
        1
    """
    return _created(kvstore) if isinstance(kvstore, str) else kvstore


class _StoreKeys:
    """Keys of the exchanges over one store."""

    def __init__(self):
        self.lock = threading.Lock()
        self.new = itertools.count(FIRST_EXCHANGE)  # handed out in the program's order: the same in every process
        self.opened = set()
        # (purpose, length) -> key, and the numbers of the calls
        self.kept: dict = collections.defaultdict(lambda: (next(self.new), itertools.count()))

    @classmethod
    def of(cls, store):
        with _lock:
            return _keys.setdefault(store, cls())


def gather(store, purpose, vector):
    """Every process's `vector`, as :meth:`Exchange.gather`; all processes call it.

    Args:
        store: a KVStore, see :func:`open_store`.
        purpose: a word for the errors; each purpose and length has one key per store.
        vector: (n,) float64.

    Example:
        >>> gather(open_store("local"), "epoch", np.array([1.5]))
        array([[1.5]])
    """
    keys = _StoreKeys.of(store)
    with keys.lock:
        key, calls = keys.kept[purpose, len(vector)]
    exchange = Exchange(store, purpose, key=key)
    exchange.prepare(len(vector))
    return exchange.gather(next(calls), vector)


class Exchange:
    """All processes hand in a vector of one length and get all of them, call by call.

    What is combined afterwards is combined in float64 and by its own rule; sums of means and squares inside the store
    would lose what they are meant to keep. Through a store that can only sum, the numbers travel as float32 pieces of
    16 bits, for MXNet's servers keep float64 as float32 whenever a variable that they forget to set happens to be true.
    Build and prepare exchanges in the same order in every process.

    Args:
        store: a KVStore that sums over processes, see :func:`open_store`.
        name: whom the errors name.
        timeout: seconds to wait for the other processes at each call.
        key: of an exchange that is built again; by default a new one.

    Example:
        >>> exchange = Exchange(open_store("local"), "layer")
        >>> exchange.prepare(2)
        >>> exchange.gather(0, np.array([1.5, 2.0]))
        array([[1.5, 2. ]])
    """

    def __init__(self, store, name, timeout=120.0, key=None):
        self.store = store
        self.name = name
        self.timeout = timeout
        self._keys = _StoreKeys.of(store)
        self._key = next(self._keys.new) if key is None else key
        getattr(store, "describe", lambda *_: None)(self._key, name)
        self.shared_gather = None  # where vectors go through shared memory, which compiled code can do as well

    def prepare(self, length):
        """Tell the store about this key, once; collective over the processes. Done before any call is in flight."""
        if self._key in self._keys.opened or hasattr(self.store, "gather"):
            return  # without the lock: another thread may hold it in the middle of an exchange
        with self._keys.lock:
            if self._key not in self._keys.opened:
                zeros = mx.nd.zeros((self.store.num_workers, _PIECES * (_HEADER + length)), ctx=mx.cpu())
                self.store.broadcast(self._key, value=zeros, out=zeros)
                zeros.wait_to_read()
                self._keys.opened.add(self._key)

    def gather(self, call, vector, has_begun=False):
        """Send `vector`, and wait for everybody's.

        Args:
            call: a number that must be the same in all processes, to notice when they are out of step.
            vector: (length,) float64.
            has_begun: compiled code has sent it through :attr:`shared_gather`, and waits no longer.

        Returns:
            (num_workers, length) float64, one row per process.

        Raises:
            BarrierTimeout: another process did not send its part in time.
            ExchangeError: what came back is not what was sent.
        """
        message = np.concatenate([(1.0, call), vector])
        # A store that can hand vectors over needs no sum for it.
        rows = self._gather(message, has_begun) if hasattr(self.store, "gather") else self._sum(message, call)
        self._check(rows, call)
        return rows[:, _HEADER:]

    def _sum(self, message, call):
        def start(array):
            with self._keys.lock:  # stores are made for one thread; the call returns before the exchange has happened
                self.store.pushpull(self._key, array, out=array)

        pieces = gather_by_sum(self.store, start, message.view(np.uint16), self.timeout)
        if pieces is None:
            waited = (
                f"{self.name}: process {self.store.rank} of {self.store.num_workers} waited {self.timeout:g} s at call "
                f"{call} for the others"
            )
            raise BarrierTimeout(
                f"{waited}. Every process must run the same layers in the same order for the same number of steps; "
                f"look for an error in another process. {flight_recorder.write(f'BarrierTimeout: {waited}')}"
            )
        return _whole(pieces)

    def _gather(self, message, has_begun):
        try:
            if self.shared_gather is None:
                self.shared_gather = getattr(self.store, "shared_gather", lambda *_: None)(self._key, message)
            return (
                self.shared_gather.gather(message, has_begun)
                if self.shared_gather
                else self.store.gather(self._key, message)
            )
        except (WorkerLost, WorkersDiffer) as error:
            raise type(error)(f"{self.name}: {error}") from None

    def _check(self, rows, call):
        if not (rows[:, 0] == 1).all():
            raise ExchangeError(
                f"{self.name}, call {call}: the KVStore {self.store.type!r} returned something else than the sum of "
                "what the processes sent. A store that runs the optimizer cannot carry moments: build the trainer with "
                "update_on_kvstore=False, or give the layer a store of its own."
            )
        if not (rows[:, 1] == call).all():
            calls = ", ".join(f"process {rank} at call {row[1]:g}" for rank, row in enumerate(rows))
            raise ExchangeError(
                f"{self.name}: the processes are out of step: {calls}. Each must run this layer equally often; after "
                "an error in one of them, restart all."
            )


def _whole(pieces):
    """Rows of float64 from rows of their pieces; what is no such piece, as when two were added up, becomes NaN.

    Example:
        >>> float(_whole(np.array([[0.1]]).view(np.uint16).astype(np.float32))[0, 0])
        0.1
    """
    right = (pieces >= 0) & (pieces < 1 << 16) & (pieces == np.floor(pieces))
    rows = np.where(right, pieces, 0).astype(np.uint16).view(np.float64)
    rows[~right.reshape(*rows.shape, _PIECES).all(axis=-1)] = np.nan
    return rows
