"""Deterministic simulator of asynchronous training: a real store, and workers on a virtual clock."""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

from .rules import Array
from .store import Grant, Store

Seconds = Callable[[np.random.RandomState], float]  # how long a step takes, drawn anew for each


def steady(seconds: float) -> Seconds:
    """Every step takes equally long."""
    return lambda random: seconds


def uneven(seconds: float, spread: float) -> Seconds:
    """Steps of a mean length, gamma-distributed; `spread`, above 0, is the standard deviation over the mean."""
    shape = 1 / spread**2
    return lambda random: random.gamma(shape, seconds / shape)


class Worker(NamedTuple):
    """A simulated worker, such as ``Worker(uneven(1.0, spread=0.2), dies_at=10)``."""

    seconds: Seconds
    pauses: Sequence[tuple[float, float]] = ()  # (when it stops, for how long); it does nothing meanwhile
    dies_at: Optional[int] = None  # the step, from 0, in the middle of which it dies


class Step(NamedTuple):
    """One step of one worker; times in virtual seconds."""

    worker: int
    start: float
    end: float
    staleness: int
    applied: bool


class Trace(NamedTuple):
    """Result of a simulation."""

    steps: list[Step]  # by their ends
    seconds: float  # when the last step ended
    stalled: list[int]  # workers that died while others need them, which wait for ever


def _end_of(start: float, length: float, pauses: Sequence[tuple[float, float]]) -> float:
    end, paused_until = start + length, start
    for begin, pause in sorted(pauses):
        if begin < end and begin + pause > paused_until:
            end += begin + pause - max(begin, paused_until)  # what is left of the pause comes on top
            paused_until = begin + pause
    return end


def simulate(store: Store, gradient: Callable[[Array, Any], tuple[Array, float]], workers: Sequence[Worker],
             batches: Iterable[Any], seed: int = 0,
             observe: Optional[Callable[[float, Store], None]] = None) -> Trace:  # fmt: skip
    """Train on a virtual clock; returns what happened, step by step.

    The gradients are real, only time is not: a step takes as long as its worker's distribution says. The outcome is a
    function of the arguments alone. Each worker draws the lengths of its steps from a random stream of its own, so
    they do not depend on the number of workers.

    Args:
        store: what the workers share, see :func:`create_store`. It is trained.
        gradient: ``gradient(weights, batch)`` returns the gradient of the mean loss and the number of samples.
        workers: as many as the store has.
        batches: handed out in their order.
        seed: for the lengths of the steps.
        observe: ``observe(time, store)`` is called at the beginning and after every push.

    Returns:
        A :class:`Trace`.

    Raises:
        ValueError: the number of workers is not the store's.

    Example:
        >>> from gluon_parallel.asynchronous import create_store, rules
        >>> for mode in ("sync", "async"):
        ...     store = create_store(mode, np.zeros(1), 2, rules.sgd, lr=0.1)
        ...     trace = simulate(store, lambda w, b: (w - b, 1), [Worker(steady(1)), Worker(steady(4))], range(20))
        ...     print(mode, trace.seconds)
        sync 40.0
        async 16.0
    """
    if len(workers) != store.num_workers:
        raise ValueError(f"simulate: {len(workers)} workers for a store of {store.num_workers}")
    randoms = [np.random.RandomState([seed, number]) for number in range(len(workers))]
    done = [0] * len(workers)
    tie = itertools.count()  # of two events at the same time, the one that was planned first comes first
    events: list[tuple[float, int, int, float, Grant]] = []  # end, tie, worker, start, what it works with
    steps: list[Step] = []
    dead: list[int] = []

    def start_ready_workers(now):
        for number, worker in enumerate(workers):
            grant = store.take(number)
            if grant is None:
                continue
            if worker.dies_at == done[number]:
                dead.append(number)  # it keeps its grant: the store does not know that it died
                continue
            end = _end_of(now, worker.seconds(randoms[number]), worker.pauses)
            heapq.heappush(events, (end, next(tie), number, now, grant))

    store.begin(batches)
    if observe is not None:
        observe(0.0, store)
    start_ready_workers(0.0)
    while events:
        now, _, number, start, grant = heapq.heappop(events)
        pushed = store.push(number, *gradient(grant.weights, grant.batch))
        done[number] += 1
        steps.append(Step(number, start, now, *pushed))
        if observe is not None:
            observe(now, store)
        start_ready_workers(now)
    # No event is left, so a worker that lives and still has work waits for a dead one.
    waiting = any(not store.is_gone(number) for number in range(len(workers)) if number not in dead)
    return Trace(steps, steps[-1].end if steps else 0.0, dead if waiting else [])
