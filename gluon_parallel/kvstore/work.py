"""Waits for exchanges that are under way, within a limit: :class:`Work`, and :class:`NumberSum`, sums of vectors."""

from __future__ import annotations

import ctypes
import math
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from ..environment import LIMIT, PATIENCE, default_timeout
from ..errors import WorkerLost
from ..forks import at_exit, end_at_once
from ..mxnet.arrays import addresses_of
from ..mxnet.compat import mx
from ..mxnet.engine import check, make_room, view
from ..mxnet.engine.failures import remember
from ..mxnet.library import check_call
from ..native import function, provide
from ..native.records import C, address_of
from . import flight_recorder

_AT_ONCE = 0.1  # seconds between two looks for Ctrl-C
_left: list[Any] = []  # kept alive for the engine, whose writes may still be pending


def gave_up(
    where: str, name: str, seconds: float, advice: str, ranks: Sequence[int] = (), kind: type[Exception] = WorkerLost
) -> Exception:
    """The error of a wait for other processes that is given up, with the flight recorder's report.

    Args:
        where: what was waited for.
        name: of the process that waits, such as ``process 0 of 2``.
        advice: what to do, unless the recorder knows of a function that only some have called.
        ranks: for whom, by their numbers in the whole run; none: it is not known.
    """
    whom = f"process {', '.join(map(str, ranks))}" if ranks else "the others"
    problem = f"{where}: {name} waited {seconds:.3g} s for {whom}"
    return flight_recorder.gave_up(problem, flight_recorder.advice(f"{advice}. A longer limit: {LIMIT}=seconds"), kind)


def name_of(store: Any) -> str:
    """The name of this process among those of a :class:`.Contract`, for errors."""
    return f"process {store.ranks[store.rank]} of {store.num_workers}"


def leave_without_waiting() -> None:
    """At the program's end, leave with ``os._exit``: MXNet's exit, or MPI's, waits for others, who may never come."""
    at_exit(lambda: end_at_once(1))


def wait_until(
    has_ended: Callable[[float], Any],
    limit: float,
    where: Callable[[], tuple[str, str]],
    advice: str,
    ranks: Sequence[int] = (),
    kind: type[Exception] = WorkerLost,
) -> None:
    """Wait for other processes within a limit; what waits otherwise says in a comment why.

    Args:
        has_ended: waits for so many seconds at most, and returns whether the wait is over. What it raises ends the
            wait, such as what has ended the exchanges.
        limit: seconds.
        where: returns what is waited for, and the name of the process that waits, for the error.
        advice, ranks, kind: as of :func:`gave_up`.

    Raises:
        WorkerLost, or `kind`: it has not ended within the limit.
    """
    end = time.monotonic() + limit
    while not has_ended(min(_AT_ONCE, limit)):
        if time.monotonic() >= end:
            raise gave_up(*where(), limit, advice, ranks, kind)


class Work:
    """An array that an exchange writes, step after step or once.

    Args:
        store: the :class:`.Contract` of the store that exchanges.
        key: of the exchange, for errors.
        array: NDArray; operators may use it before the exchange has ended, and wait for it.
    """

    def __init__(self, store: Any, key: Hashable, array: Any) -> None:
        make_room()
        self._record = C.Arrival(arrived=1, array=addresses_of([array])[0])  # first, for __del__
        self.array, self._store, self._key = array, store, key
        self._address, self._last = address_of(self._record), 0
        self._then: Callable[[], None] | None = None

    def begin(self, then: Callable[[], None] | None = None) -> None:
        """The exchange has been started; the one before has ended.

        Args:
            then: called in a thread of the engine, before the wait ends, if the array's last value, a float64 on the
                CPU, is above 0.
        """
        self._then = then
        if then is not None:
            _waiting[self._address] = self
            self._last = self._last or address_of(view(self.array)[-1:])
        self._record.value = 0 if then is None else self._last
        check_call(_expect(self._address))

    def cancel(self) -> None:
        """Do not call `then`, if it has not been called."""
        with _telling:
            self._then = None

    def has_ended(self) -> bool:
        """Whether the array is there, or the exchange has failed."""
        return bool(self._record.arrived)

    def wait(self, limit: float | None, advice: str, where: str = "", kind: type[Exception] = WorkerLost) -> None:
        """Wait until the exchange has ended; the array may have failed then.

        Args:
            limit: seconds; None: ten times ``GLUON_PARALLEL_TIMEOUT``, as others may evaluate or write meanwhile.
            advice: what every process must do, for the error.
            where: what is waited for; by default the store and the key.

        Raises:
            WorkerLost, or `kind`: it has not ended within the limit.
        """
        if _await(self._address, int(_AT_ONCE * 1e9) if limit is None else 0):
            return
        limit = PATIENCE * default_timeout() if limit is None else limit
        store = self._store

        def said() -> tuple[str, str]:
            return where or f"store {store.type!r}, {flight_recorder.RECORDER.words_of_key(self._key)}", name_of(store)

        wait_until(lambda seconds: _await(self._address, math.ceil(seconds * 1e9)), limit, said, advice, kind=kind)

    def __del__(self) -> None:
        if not self.has_ended():
            _left.append((self._record, self.array))

    def _tell(self) -> None:
        if self._then is not None:
            try:
                self._then()
            except Exception as error:  # it cannot cross C
                remember(error)


_waiting: weakref.WeakValueDictionary[int, Work] = weakref.WeakValueDictionary()  # by address, those with a `then`
_telling = threading.Lock()  # so that who cancels a `then` knows whether it has been called
_await, _expect = function("gp_await", 2), function("gp_expect", 1, keeps_lock=True)


def _tell(address: int) -> int:
    """Called by the C library: the last value of that work's array is above 0."""
    with _telling:
        work = _waiting.get(address)
        if work is not None:
            work._tell()
    return 0


provide("arrived_above_zero", _tell, ctypes.c_int64)


class NumberSum:
    """Sums over the processes of one store, under a key of its own. Every process must make it before the first sum.

    Args:
        store: the :class:`.Contract` of the store; where it is one process, sums are what they are made of.
        key: a whole number, as a trainer's keys are: a store takes numbers or names, not both.
        size: how many values each sum has.
        dtype: of the values.

    Attributes:
        array: (size,) NDArray, the sum that was started last, on the CPU; the next one has the same memory. It is for
            operators, if all sums are those of arrays.
    """

    def __init__(self, store: Any, key: int, size: int, dtype: str = "float64") -> None:
        self.array: Any = None
        self._dtype = dtype
        self._work: Work | None = None
        if store.num_workers > 1:
            zeros = mx.nd.zeros(size, ctx=mx.cpu(), dtype=dtype)
            store.broadcast(key, zeros, [zeros])
            self.array = mx.nd.empty(size, ctx=mx.cpu(), dtype=dtype)
            self._values = view(self.array)
            self._work = Work(store, key, self.array)
            self._plan = store.plan([key], [[self.array]], priorities=[1 << 20])

    def start(self, values: Any, then: Callable[[], None] | None = None) -> NumberSum:
        """Start a sum of an array (`size`,) on any device, or of `size` numbers, ahead of all other exchanges.

        It waits for the sum before, also that of a step that broke off: ps-lite would add this one to that.

        Args:
            then: as of :meth:`Work.begin`.
        """
        if self._work is None:
            self.array = values if isinstance(values, mx.nd.NDArray) else mx.nd.array(values, mx.cpu(), self._dtype)
            return self
        self._work.wait(None, "Every process must take as many steps")
        self.array.wait_to_read()  # raises what has ended it
        if isinstance(values, mx.nd.NDArray):
            values.astype(self._dtype, copy=False).copyto(self.array)
        else:
            self._values[:] = values
        self._plan.push()
        self._work.begin(then)
        return self

    def wait(self, advice: str = "Every process must take as many steps (gp.sampler.join sees to that)") -> np.ndarray:
        """Wait for the sum; returns it as a NumPy array.

        Args:
            advice: what every process must do, for the error.

        Raises:
            WorkerLost: another process did not send its part within ten times ``GLUON_PARALLEL_TIMEOUT``, or the
                exchange ended with an error.
        """
        if self._work is not None:
            self._work.wait(None, f"{advice}; look for an error in another process")
        values = self.array.asnumpy()
        if self._work is not None and np.isnan(values).any():  # what an exchange leaves behind that could not be done
            check()
            raise WorkerLost("the processes' numbers could not be summed; an earlier error says why")
        return values

    def cancel(self) -> None:
        """Do not call the `then` of the sum that was started last, of a step that has failed here."""
        if self._work is not None:
            self._work.cancel()
