"""Barrier for the devices of one process: exchange values by key, with a timeout and errors that name the missing."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Collection, Iterable
from typing import Any, Callable

import numpy as np

from .engine.failures import fresh
from .errors import BarrierBroken, BarrierTimeout
from .kvstore import flight_recorder
from .kvstore.flight_recorder import RECORDER

_ASK_EVERY = 0.5  # seconds


class _Rendezvous:
    """One gathering at one key: who has come, with what, and what they leave with."""

    def __init__(self, lock: threading.Lock) -> None:
        self.changed = threading.Condition(lock)
        self.values: dict[str, Any] = {}  # device -> what it brought
        self.full = False  # everyone came; the last is combining
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.record = 0  # its number in the flight recorder; 0 if it has none


class Barrier:
    """Exchanges values between the devices of a process, call after call; the last to come asks the other processes.

    Everyone who takes part must bring a value to the same keys, in any order of arrival. When one call fails,
    everyone who waits here is released with the reason, and everyone who comes later is refused, until :meth:`reopen`:
    a result that mixes an abandoned step with the next one is worse than none.

    Args:
        name: whom the errors name, for instance the layer.
        timeout: seconds to wait for the others at each call; a new value also counts for those who wait already.
        exchange: function of the combined value that meets the other processes and returns the value of all; by
            default there are no others. Called by one thread at a time for each key, outside the lock.
        explain: function of (key, devices that wait, devices that are missing), called every half second by a device
            that waits; it returns None, or an exception that ends the wait because the missing devices cannot come.
        gate: an object, whose attribute `is_open` is 1 while nothing has failed: for compiled code, which cannot ask.

    Example:
        >>> barrier = Barrier("layer", timeout=10)
        >>> results = []
        >>> def device(name, value):
        ...     results.append(barrier.allreduce(("forward", 0), name, value, {"a", "b"}, sum))
        >>> threads = [threading.Thread(target=device, args=pair) for pair in [("a", 1), ("b", 2)]]
        >>> for thread in threads: thread.start()
        >>> for thread in threads: thread.join()
        >>> results
        [3, 3]
    """

    def __init__(
        self,
        name: str,
        timeout: float = 120.0,
        exchange: Callable[[tuple, Any], Any] | None = None,
        gate: Any = None,
        explain: Callable[[tuple, list[str], list[str]], Exception | None] | None = None,
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.exchange = exchange
        self.explain = explain
        self._lock = threading.Lock()
        self._rendezvous: dict[tuple, _Rendezvous] = {}
        self._calls: dict[str, np.ndarray] = {}
        self.failure: BaseException | Any = None  # the error that closed this barrier; None while it is open
        self._gate = types.SimpleNamespace() if gate is None else gate
        self._gate.is_open = 1

    @property
    def calls(self) -> int:
        """How many calls have been numbered since the last :meth:`reopen`."""
        with self._lock:
            return max((int(count[0]) for count in self._calls.values()), default=0)

    def count(self, device: str) -> np.ndarray:
        """(1,) int64, the calls of this device that have been numbered; compiled code may count there."""
        with self._lock:
            return self._calls.setdefault(device, np.zeros(1, np.int64))

    def allreduce(
        self,
        key: tuple,
        device: str,
        value: Any,
        devices: Collection[str],
        combine: Callable[[list], Any],
        since: float | None = None,
    ) -> Any:
        """Bring `value` to the call at `key`, wait for the other `devices`, and leave with what all brought.

        Args:
            key: tuple of words and numbers that the error message shows, such as ``("forward", 3)``.
            device, devices: name of the one who comes; names of those who take part, the same for everyone.
            combine: function of the list of values, ordered by device name so that the result does not depend on who
                came first; what it returns goes through `exchange`, and is the same object for everyone.
            since: ``time.monotonic()`` when the wait began, if that was in compiled code.

        Raises:
            BarrierTimeout: someone did not come in time; names the barrier, the key, who came and who is missing.
            BarrierBroken: someone else's failure released this device, or it came after the failure.
        """
        with self._lock:
            if self.failure is not None:
                raise BarrierBroken(f"{self._where(key)}: {device} comes after the step has failed: {self.failure}")
            rendezvous = self._rendezvous.get(key) or self._begin(key, devices)
            if device in rendezvous.values or device not in devices:
                came = "came twice to" if device in rendezvous.values else "takes no part in"
                error = BarrierBroken(
                    f"{self._where(key)}: {device} {came} this rendezvous of {_names(devices)}. Every device must run "
                    "the same layers equally often; devices that take part in a smaller step are named beforehand."
                )
                self._break(error)
                raise fresh(error)
            rendezvous.values[device] = value
            if len(rendezvous.values) < len(devices):
                return self._wait(rendezvous, key, device, devices, since)
            rendezvous.full = True
            del self._rendezvous[key]  # the key may be used again at once, by whoever leaves first
        return self._complete(rendezvous, key, combine)

    def abandon(self, reason: str | BaseException) -> None:
        """:meth:`close` with an error that tells the `reason`, a sentence or an exception."""
        cause = reason if isinstance(reason, BaseException) else None
        words = reason if cause is None else f"{type(cause).__name__}: {cause}"
        error = BarrierBroken(f"{self.name}: the step was abandoned: {words}")
        error.__cause__ = cause
        self.close(error)

    def close(self, error: BaseException) -> None:
        """Release everyone who waits here with `error` itself, and refuse everyone who comes, until :meth:`reopen`."""
        with self._lock:
            self._break(error)

    def reopen(self) -> None:
        """Start anew after a failure: calls count from 0. No thread of the failed step may still call."""
        with self._lock:
            self.failure = None
            self._rendezvous.clear()
            for count in self._calls.values():
                count[0] = 0
            self._gate.is_open = 1

    def _begin(self, key: tuple, devices: Collection[str]) -> _Rendezvous:
        rendezvous = self._rendezvous[key] = _Rendezvous(self._lock)
        if len(devices) > 1:
            name = "rendezvous", "", f"{self.name}, {key[0]}"
            rendezvous.record = RECORDER.begin(name, 0, key[-1] + 1 if isinstance(key[-1], int) else None)
        return rendezvous

    def _wait(
        self, rendezvous: _Rendezvous, key: tuple, device: str, devices: Collection[str], since: float | None
    ) -> Any:
        began = time.monotonic() if since is None else since
        while not rendezvous.done:
            left = began + self.timeout - time.monotonic()
            if left > 0:
                rendezvous.changed.wait(min(left, _ASK_EVERY))
            elif rendezvous.full:  # all have arrived; the exchange has a limit of its own
                rendezvous.changed.wait()
            if rendezvous.done or rendezvous.full:
                continue
            missing = sorted(set(devices) - set(rendezvous.values))
            error = None if self.explain is None else self.explain(key, sorted(rendezvous.values), missing)
            if error is None and left <= 0:
                waited = f"{self._where(key)}: {device} waited {self.timeout:g} s"
                recorded = flight_recorder.write(f"BarrierTimeout: {waited}")
                error = BarrierTimeout(
                    f"{waited}; {_names(rendezvous.values)} arrived, {_names(missing)} did not{self._seen(missing)}. "
                    "Every device must run the same layers in the same order and equally often; look for an error on a "
                    "missing device, for a device without samples (name the devices that take part), or raise the "
                    f"timeout. {recorded}"
                )
            if error is not None:
                self._break(error)
        if rendezvous.error is not None:
            raise fresh(rendezvous.error)
        return rendezvous.result

    def _complete(self, rendezvous: _Rendezvous, key: tuple, combine: Callable[[list], Any]) -> Any:
        error: BaseException | None = None
        result = None
        try:
            result = combine([rendezvous.values[device] for device in sorted(rendezvous.values)])
            if self.exchange is not None:
                result = self.exchange(key, result)
        except BaseException as problem:  # Ctrl-C too: the other devices wait without a limit now
            error = problem
        with self._lock:
            if error is None and rendezvous.record:
                RECORDER.end(rendezvous.record)
            rendezvous.result, rendezvous.error, rendezvous.done = result, error, True
            rendezvous.changed.notify_all()
            if error is not None:
                self._break(error)
        if error is not None:
            raise error
        return result

    def _break(self, error: BaseException) -> None:
        """Close the barrier with `error`; the lock is held."""
        self._gate.is_open = 0
        if self.failure is None:
            self.failure = error
        for rendezvous in self._rendezvous.values():
            rendezvous.error, rendezvous.done = error, True
            rendezvous.changed.notify_all()
        self._rendezvous.clear()

    def _seen(self, missing: Iterable[str]) -> str:
        """Where the missing are, as far as this barrier knows."""
        places = [f"{device} waits at {' '.join(map(str, key))}" for key, rendezvous in self._rendezvous.items()
                  for device in missing if device in rendezvous.values]  # fmt: skip
        calls = [f"{device} has come to {int(self._calls.get(device, [0])[0])} calls" for device in missing]
        return f" ({'; '.join(places + calls)})"

    def _where(self, key: tuple) -> str:
        return f"{self.name}, {' '.join(map(str, key))}"


def _names(devices: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, devices))) or "nobody"
