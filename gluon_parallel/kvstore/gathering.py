"""Vectors of all processes by rank: through what a store has for them, or else through a sum."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from ..environment import default_timeout
from ..errors import BarrierTimeout, ExchangeError, WorkerLost
from ..mxnet.compat import mx
from .protocols import Vectors, offers
from .state import state_of
from .work import Work, leave_without_waiting


class Gathering:
    """Every process's vector under way, as 16 bits in each float32 of a row of its own: a sum that every store keeps.

    MXNet's servers keep float64 as float32 whenever a variable that they forget to set happens to be true.
    """

    def __init__(self, store: Any, key: Hashable, vector: np.ndarray) -> None:
        pieces = np.zeros((store.num_workers, vector.nbytes // 2), np.float32)
        pieces[store.rank] = vector.view(np.uint16)
        self._work: Work = store.start_sum(key, mx.nd.array(pieces, ctx=mx.cpu()))
        self._type, self._dtype, self.wait = store.type, vector.dtype, self._work.wait

    def rows(self) -> np.ndarray:
        """The vectors by rank, when it has ended. ExchangeError: what came back is not what was sent."""
        pieces = self._work.array.asnumpy()
        if not ((pieces >= 0) & (pieces < 1 << 16) & (pieces == np.floor(pieces))).all():
            raise ExchangeError(
                f"the KVStore {self._type!r} did not return the sum of what the processes sent; a store that "
                "runs the optimizer cannot: make the trainer with update_on_kvstore=False, or give the layer a store "
                "of its own"
            )
        return pieces.astype(np.uint16).view(self._dtype)


def prepare_gather(store: Any, key: Hashable, length: int) -> None:
    """Before the first :func:`gathered` of `length` numbers; all processes call it while nothing is in flight."""
    if not offers(store, Vectors):  # which prepares a key when it is gathered
        open_for_sums(store, key, mx.nd.zeros((store.num_workers, 4 * length), ctx=mx.cpu()))  # in pieces of 16 bits


def open_for_sums(store: Any, key: Hashable, zeros: Any) -> None:
    """Make a key known to the servers of a store that has some, once."""
    state = state_of(store)
    if key in state.opened:  # without the lock: another thread may hold it in the middle of an exchange
        return
    with state.lock:
        if key not in state.opened:
            work = Work(store, key, zeros)
            store.broadcast(key, value=zeros, out=zeros)
            work.begin()
            work.wait(default_timeout(), "Every process must open the same keys", kind=BarrierTimeout)
            zeros.wait_to_read()
            state.opened.add(key)


def gathered(
    store: Any,
    key: Hashable,
    vector: np.ndarray,
    limit: float | None = None,
    where: str = "",
    kind: type[Exception] = BarrierTimeout,
) -> np.ndarray:
    """Every process's `vector`, (n,), by rank: (num_workers, n); waits for all.

    Args:
        store: a :class:`.Contract`.
        key: used for nothing else.
        limit: seconds, by default ``GLUON_PARALLEL_TIMEOUT``; a store with :class:`.Vectors` has a limit of its own.
        where, kind: as of :meth:`.Work.wait`.

    Raises:
        WorkerLost, or `kind`: another process did not send its part within the limit.
        ExchangeError: what came back is not what was sent.
    """
    if offers(store, Vectors):
        return store.gather(key, vector)
    work = store.start_gather(key, vector)
    try:
        limit = default_timeout() if limit is None else limit
        work.wait(limit, "Every process must run the same program, in one order; look at their output", where, kind)
    except WorkerLost:
        leave_without_waiting()
        raise
    return work.rows()
