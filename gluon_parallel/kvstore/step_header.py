"""Header of a step: all its small numbers in one vector, which is summed over the processes once per step."""

from __future__ import annotations

import ctypes
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import WorkerLost
from ..mxnet.compat import mx
from ..mxnet.engine import Call, check, view
from ..mxnet.engine.failures import remember
from ..native import address, function, provide
from ..native.records import C, address_of
from . import flight_recorder
from .contract import Plan, contract, is_distributed
from .environment import default_timeout
from .handshake import FEWER_PASSES, ONE_DIVISOR, ONE_RATE, differ, divided_by
from .reserved_keys import HEADER

NUM_SIGNALS = 3  # by which a training is asked to stop
DIGEST_BITS = 32  # of the weights, and of the first inputs
PATIENCE = 10  # limits; another process may evaluate or write between two steps
_AT_ONCE = 0.1  # seconds between two looks for Ctrl-C
_left: list[Any] = []  # kept alive for the engine, whose writes may still be pending


class _Place:
    """An array for one sum at a time, and what is needed to start the sum and to wait for it."""

    def __init__(self, store: Any, key: int, size: int) -> None:
        self._arrival = C.Arrival(arrived=1)  # first, for __del__
        self.array = mx.nd.empty(size, ctx=mx.cpu(), dtype="float64")
        self.values = view(self.array)
        self._last = address_of(self.values[-1:])
        self.plan: Plan = contract(store).plan([key], [[self.array]], priorities=[1 << 20])
        self.where = address_of(self._arrival)
        self._call = Call(address("gp_arrive"), self.where, [self.array], [], "arrives", always=True)
        self.then: Callable[[], None] | None = None  # see `BackgroundSum.sum`

    def start(self, then: Callable[[], None] | None) -> None:
        """Start the sum of what is in the array."""
        self.plan.push()
        self.then = then
        self._arrival.value = 0 if then is None else self._last
        self._arrival.arrived = 0
        self._call.push(1 << 20)

    def arrives(self, limit: float) -> bool:
        """Wait for the sum; returns whether it is there, or has failed, within so many seconds."""
        end = time.monotonic() + limit
        while not _await(self.where, math.ceil(min(_AT_ONCE, limit) * 1e9)):
            if time.monotonic() >= end:
                return False
        return True

    @property
    def has_arrived(self) -> bool:
        return bool(self._arrival.arrived)

    def __del__(self) -> None:
        if not self.has_arrived:
            _left.append((self._arrival, self._call))


_places: weakref.WeakValueDictionary[int, _Place] = weakref.WeakValueDictionary()  # by address, those with a `then`
_telling = threading.Lock()  # so that who cancels a `then` knows whether it has been called
_await = function("gp_await", 2)


def _tell(address: int) -> int:
    """Called by the C library: the last value of that place's sum is above 0."""
    with _telling:
        place = _places.get(address)
        if place is not None and place.then is not None:
            try:
                place.then()
            except Exception as error:  # it cannot cross C
                remember(error)
    return 0


provide("arrived_above_zero", _tell, ctypes.c_int64)


def _wait(place: _Place, missing: str, hint: str) -> None:
    """Wait for a sum; WorkerLost says what did not come, and what every process must do."""
    if place.arrives(_AT_ONCE):
        return
    limit = PATIENCE * default_timeout()
    if not place.arrives(limit):
        advice = flight_recorder.advice(f"Every process must {hint}; look for an error in another process")
        raise flight_recorder.gave_up(f"{missing} came from the other processes within {limit:g} s", advice)


class BackgroundSum:
    """Sums over the processes of one store, under a key of its own. Every process must make it before the first sum.

    Args:
        store: the trainer's; None without one.
        key: a whole number, as a trainer's keys are: a store takes numbers or names, not both.
        size: how many values each sum has.
    """

    def __init__(self, store: Any, key: int, size: int) -> None:
        self._store, self._key, self._size = store if is_distributed(store) else None, key, size
        self._last: _Place | None = None
        self._free: list[_Place] = []
        self._pending: dict[int, _Place] = {}  # by the identity of their arrays
        if self._store is not None:
            zeros = mx.nd.zeros(size, ctx=mx.cpu(), dtype="float64")
            store.broadcast(key, zeros, [zeros])

    def sum(self, values: Any, then: Callable[[], None] | None = None) -> Any:
        """Start a sum of arrays (`size`,) on any device, or of `size` numbers, ahead of all other exchanges.

        Args:
            then: called in a thread of the engine, before the sum can be read, if the last value is above 0.

        Returns:
            An array that becomes the sum, float64 on the CPU, until :meth:`read` returns its values; `values`
            themselves where there is no other process.
        """
        if self._store is None:
            return values
        if self._last is not None:  # of a step that broke off: ps-lite would add this one to that
            _wait(self._last, "no numbers of an earlier step", "take as many steps")
            self._last.array.wait_to_read()  # raises what has ended it
        place = self._free.pop() if self._free else _Place(self._store, self._key, self._size)
        if isinstance(values, mx.nd.NDArray):
            values.astype("float64").copyto(place.array)
        else:
            place.values[:] = values
        if then is not None:
            _places[place.where] = place
        place.start(then)
        self._last = self._pending[id(place.array)] = place
        return place.array

    def cancel(self, total: Any) -> None:
        """Do not call the `then` of this sum, of a step that has failed here."""
        place = self._pending.get(id(total))
        if place is not None:
            with _telling:
                place.then = None

    def read(
        self,
        total: Any,
        missing: str = "no numbers of samples",
        hint: str = "take as many steps (gp.sampler.join sees to that)",
    ) -> np.ndarray:
        """Wait for the sum `total` that :meth:`sum` has started; returns it as a NumPy array.

        Args:
            missing, hint: for the error: what did not come, and what every process must do.

        Raises:
            WorkerLost: another process did not send its part within ten times ``GLUON_PARALLEL_TIMEOUT``, or the
                exchange ended with an error.
        """
        place = self._pending.get(id(total))
        if place is None:
            return total.asnumpy() if isinstance(total, mx.nd.NDArray) else np.asarray(total, np.float64)
        _wait(place, missing, hint)
        values = total.asnumpy()
        if np.isnan(values).any():  # what an exchange leaves behind that could not be done
            check()
            raise WorkerLost("the processes' numbers could not be summed; an earlier error says why")
        self._free.append(self._pending.pop(id(total)))
        return values


class StepHeader:
    """The small numbers of the steps of one trainer; a header without parameters serves a loop without a trainer.

    Every process makes it before the first step, and sends it equally often. The sum has the fields of `own`:

    - ``reached`` (parameters,): 1 for each parameter that the losses have reached.
    - ``divisors``, ``rates``, ``passes``, (processes,) each: what each process divides by, its learning rate, and its
      number of backward passes, below 0 if it is smaller than before; each in its own place, 0 if it says nothing.
    - ``stop`` (NUM_SIGNALS,): how many processes have had each signal.
    - ``digest`` (2 * DIGEST_BITS,): how many have each bit of a digest of the weights, and of the first inputs.
    - ``samples`` and ``idle``: how many samples there are, and how many processes without any.

    Args:
        store: the trainer's; None without one.
        num_parameters: of the trainer.
        key: under which it is summed; a store has one header for each number of parameters.

    Attributes:
        own: what this process sends next, a record of these fields. ``stop`` stays, others become 0 when it is sent.
        num_sent: how often it was.
    """

    def __init__(self, store: Any, num_parameters: int = 0, key: int = HEADER) -> None:
        ours = contract(store)
        self.rank, self._store, self._ranks = ours.rank, store, ours.ranks
        sizes = {"reached": num_parameters, **dict.fromkeys(("divisors", "rates", "passes"), ours.num_workers)}
        sizes.update({"stop": NUM_SIGNALS, "digest": 2 * DIGEST_BITS})
        fields: list[Any] = [(name, "f8", (size,)) for name, size in sizes.items()]
        self._fields = np.dtype([*fields, ("samples", "f8"), ("idle", "f8")])  # the last one is what `then` follows
        self._flat = np.zeros(self._fields.itemsize // 8)
        self.own: Any = self._flat.view(self._fields)[0]
        self._sum = BackgroundSum(store, key, self._flat.size)
        self.num_sent = 0
        self._total: Any = None  # the sum that was started last: an array that becomes it
        self._values: Any = None  # of that sum, once they are read

    def is_of(self, store: Any) -> bool:
        """Whether it sums over the processes of `store`, of which none was lost since it was made."""
        return store is self._store and self._ranks == contract(store).ranks

    def send(self, then: Callable[[], None] | None = None) -> None:
        """Start the sum of what every process has in `own`, ahead of all other exchanges.

        Args:
            then: called in a thread of the engine, before the sum can be read, if a process is idle.

        Raises:
            WorkersDiffer, WorkerLost: as :meth:`read`, of the sum before.
        """
        if self._total is not None:  # it has arrived, or this sum would wait for it, too
            self.read()
        self._total, self._values = self._sum.sum(self._flat.copy(), then), None
        stop = self.own["stop"].copy()
        self._flat[:] = 0
        self.own["stop"] = stop
        self.num_sent += 1

    def read(self) -> Any:
        """Wait for the sum that was started last; returns it, a record.

        Raises:
            WorkersDiffer: processes divide by different numbers, or have different learning rates; or one has made
                fewer backward passes than the others, and than before: it had no samples in the last one, and its
                gradients are those of an earlier pass.
            WorkerLost: another process did not send its part in time.
        """
        if self._values is None:
            self._values = self._sum.read(self._total).view(self._fields)[0]
            self._compare(self._values)
        return self._values

    def abandon(self) -> None:
        """The step that has sent it has failed here: do not call its `then`."""
        if self._total is not None and self._values is None:
            self._sum.cancel(self._total)

    def _compare(self, sums: Any) -> None:
        passes, kind, ranks = sums["passes"], self._store.type, self._ranks
        if (passes < 0).any() and abs(passes[passes < 0]).min() < abs(passes).max():
            said = {rank: f"make {abs(num):.0f} backward passes" for rank, num in zip(ranks, passes) if num}
            raise differ(f"gluon.Trainer, before one step with {kind!r}", said, FEWER_PASSES)
        for remedy, values, say in (
            (ONE_DIVISOR, sums["divisors"], divided_by),
            (ONE_RATE, sums["rates"], "train with the learning rate {:.6g}".format),
        ):
            known = values[values != 0]
            if known.size and np.ptp(known) > 1e-6 * abs(known).max():  # MXNet's servers may keep float32
                said = {rank: say(value) for rank, value in zip(ranks, values) if value}
                raise differ(f"gluon.Trainer, store {kind!r}", said, remedy)


_headers: weakref.WeakKeyDictionary[Any, StepHeader] = weakref.WeakKeyDictionary()


def header_of(trainer: Any) -> StepHeader:
    """The header of this trainer's steps over the processes of its store, which is made by now."""
    header = _headers.get(trainer)
    if header is None or not header.is_of(trainer._kvstore):
        header = _headers[trainer] = StepHeader(trainer._kvstore, len(trainer._params))
    return header
