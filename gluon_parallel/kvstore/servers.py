"""MXNet's stores ``dist_...``, whose workers compare what they send before a server takes a key's first array."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from ..environment import default_timeout
from ..errors import ArrayMismatch, CompressionFault, StoreUnavailable, WorkerLost, warn
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import as_tuple
from ..mxnet.engine import ending
from ..mxnet.library import free_store
from .base import pairs
from .contract import Contract
from .handshake import compare_once, differ, signature, spelled, words_of
from .reserved_keys import FIRST_COUNT, FIRST_RESERVED
from .work import Work, leave_without_waiting

_living: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # the one store of this process, by its name


class Names:
    """The numbers of one store's names: MXNet's store takes either names or whole numbers, for good.

    The checks and statistics of this package travel under whole numbers, so the store is given only those. MXNet
    numbers names from 0 in the order in which they are opened, and an optimizer on the servers knows them by these
    numbers; so do we.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._numbers: dict = {}
        self._has_own_numbers = False

    def open(self, keys: Sequence[Any]) -> None:
        """Give new names their numbers; names and whole numbers are not mixed, which MXNet refuses, too."""
        for key in keys:
            if isinstance(key, str):
                self._numbers.setdefault(key, len(self._numbers))
            elif key < FIRST_RESERVED:
                self._has_own_numbers = True
        if self._numbers and self._has_own_numbers:
            raise self._error(keys[0], "mixed key types; a store takes either names or whole numbers")

    def numbers(self, key: Any) -> Any:
        """What MXNet's store is given for `key`, a name, a whole number, or a list of them."""
        if isinstance(key, (list, tuple)):
            return [self.numbers(one) for one in key]
        if isinstance(key, str) and key not in self._numbers:
            raise self._error(key, "nothing has been opened under it; call init or broadcast first")
        return self._numbers.get(key, key)

    def _error(self, key: Any, words: str) -> Exception:
        return mx.base.MXNetError(f"store {self._store!r}, key {key!r}: {words}")


class Servers(Contract, mx.kvstore.KVStore):
    """A store over MXNet's servers which refuses processes that differ, on all of them, before a server is asked.

    Where the servers do not sum, each process compares itself with process 0, and only one that differs is refused:
    over ``dist_async``, and once there are an optimizer on the servers or compression.
    """

    handle: Any  # MXNet's; deleted by `close`
    library = "ps-lite, in MXNet"

    @property
    def is_asynchronous(self) -> bool:
        return "async" in self.type

    @classmethod
    def of(cls, store: Any) -> Servers:
        """`store`, which MXNet has just made in every process, as one of these, after the versions are compared."""
        store.__class__ = cls  # it owns a handle of MXNet's and frees it, so nothing can be made around that
        store._names = Names(store.type)
        store._signatures = {}  # key -> what was opened under it
        store._num_compared = 0
        store.sums = not store.is_asynchronous
        store._compressed = False
        store._open("MXNet")
        return store

    def init(self, key: Any, value: Any) -> None:
        """As MXNet's; every process must send arrays alike, and under each key once."""
        self._open_keys(key, value)
        with self._recorded("b", key, value) as numbers:
            super().init(numbers, value)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """As MXNet's, but it waits; every process must send arrays alike, and under each key once.

        MXNet does not order the key's first sum behind it: at times the weights were those gradients.

        Raises:
            WorkerLost: the values did not come within ``GLUON_PARALLEL_TIMEOUT``.
        """
        self._open_keys(key, value)
        works = [Work(self, one, array) for one, arrays in pairs(key, out) for array in as_tuple(arrays)]
        with self._recorded("b", key, value, out) as numbers:
            super().broadcast(numbers, value, out, priority)
        for work in works:
            work.begin()
            try:
                work.wait(default_timeout(), "Look for an error in another process or on a server")
            except WorkerLost:
                leave_without_waiting()
                raise

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """As MXNet's."""
        with self._recorded("u", key, value) as numbers:
            super().push(numbers, value, priority)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """As MXNet's."""
        with self._recorded("d", key, out) as numbers:
            super().pull(numbers, out, priority, ignore_sparse)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """As MXNet's."""
        with self._recorded("d", key, out) as numbers:
            super().row_sparse_pull(numbers, out, priority, row_ids)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Every array in `out` becomes the sum of all processes' `value` arrays.

        ArrayMismatch: `value` is not like what the key was opened with; MXNet would end this process.
        """
        if self._compressed:
            raise ValueError(
                f"store {self.type!r}: MXNet cannot sum compressed gradients (pushpull), and gluon.Trainer knows no "
                "other way; leave compression_params out, or take the store mpi, which compresses"
            )
        for one, arrays in pairs(key, value):
            opened = self._signatures.get(one)
            if opened is not None and signature(arrays) != opened:
                raise ArrayMismatch(
                    f"store {self.type!r}, key {one}: it was opened with {opened}, and now gets {signature(arrays)}. "
                    "MXNet's servers keep one shape and dtype per key"
                )
        with self._recorded("s" if self.sums else "x", key, value, out) as numbers:
            super().pushpull(numbers, value, out, priority)

    def set_optimizer(self, optimizer: Any) -> None:
        """As MXNet's: the servers update the weights from now on."""
        self.sums = False
        super().set_optimizer(optimizer)

    def set_gradient_compression(self, compression_params: Any) -> None:
        """As MXNet's: in two bits, between push and pull. MXNet has no sum (``pushpull``) of compressed gradients.

        Warns (``CompressionFault``) of two bits: on a busy machine a pull returns values of an earlier exchange.
        """
        if dict(compression_params).get("type") == "2bit":
            warn(
                f"store {self.type!r}, compression of 2 bits: on a busy machine MXNet's pull returns values of an "
                "earlier exchange, without an error. Take the store mpi, which compresses, or leave compression out",
                CompressionFault,
            )
        super().set_gradient_compression(compression_params)
        self.sums, self._compressed = False, True

    def close(self) -> None:
        """Part from the servers, when all workers do; waits for them, and first for all that is queued.

        Raises:
            Exception: of what failed, and nobody has read; the store is closed.
        """
        if "handle" not in vars(self):
            return
        try:
            mx.nd.waitall()  # what is in flight uses the handle; and where it fails, MXNet's own wait would abort
        finally:
            handle = self.handle
            del self.handle
            free_store(handle)

    __del__ = close

    def __getattr__(self, name: str) -> Any:
        if name == "handle":
            raise StoreUnavailable("the store over MXNet's servers is closed")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # ------------------------------------------------------------------

    @contextlib.contextmanager
    def _recorded(self, kind: str, key: Any, values: Any, outs: Any = None) -> Iterator[Any]:
        """Record what is queued in this block, per key: it reads `values`, writes `outs`. Yields the keys' numbers."""
        numbers = self._names.numbers(key)  # first: nothing is recorded under a name that is not open
        with contextlib.ExitStack() as stack:
            for (one, read), (_, out) in zip(pairs(key, values), pairs(key, values if outs is None else outs)):
                stack.enter_context(self._exchanges.recorded(kind, one, as_tuple(read), as_tuple(out)))
            yield numbers

    def _open_keys(self, key: Any, value: Any) -> None:
        keys, values = (key, value) if isinstance(key, (list, tuple)) else ([key], [value])
        self._names.open(keys)
        for one in keys:
            if one in self._signatures:
                raise ValueError(
                    f"store {self.type!r}, key {one}: it is open already, with {self._signatures[one]}. MXNet's "
                    "servers keep a key for good, and a process has one such store: two trainers need the store mpi"
                )
        compare_once(self, keys, values)
        self._signatures.update({one: signature(arrays) for one, arrays in zip(keys, values)})

    def agree_with_first(self, says: Sequence[str], advice: str) -> None:
        """As :func:`.agree` where the servers do not sum: compare with what process 0 says."""
        for sentence in says:
            self._num_compared += 1
            mine = words_of(sentence)
            first = mx.nd.array(mine, ctx=mx.cpu(), dtype="float32")
            key = FIRST_COUNT - self._num_compared
            with self._recorded("b", key, first):
                super().broadcast(key, first, first)
            said = {0: spelled(first.asnumpy()), self.rank: spelled(mine)}
            if said[0] != said[self.rank]:
                leave_without_waiting()  # process 0 goes on, and MXNet's way out waits for it
                raise differ(f"store {self.type!r}", said, advice)

    def _start_sum(self, key: Hashable, array: Any) -> None:
        if key not in self._signatures:
            self._signatures[key] = signature(array)
            zeros = mx.nd.zeros_like(array)
            super().broadcast(key, zeros, zeros)
        with self._recorded("g", key, array):
            super().pushpull(key, array, array)


def the_store(name: str, create: Callable[[str], Any]) -> Servers:
    """The store of that name over MXNet's servers: made by `create` at the first call, and handed out again after it.

    MXNet itself waits for ever if a process makes a second one, so one of another name is refused.
    """
    name = name.lower()
    others = [other for other in _living if other != name]
    if others:
        raise StoreUnavailable(
            f"the store {name!r} cannot be made beside {others[0]!r}: a process has one store over MXNet's servers"
        )
    store = _living.get(name)
    if store is None:
        store = _living[name] = Servers.of(create(name))
    return store


@ending.at_exit_after_engine
def _close() -> None:
    """While Python still runs: a store that a script's global names keep alive would be closed too late."""
    for store in list(_living.values()):
        store.close()
