"""Deterministic simulator of asynchronous training: a real store, workers on a virtual clock, a small net in NumPy."""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

import gluon_parallel as gp

rules = gp.asynchronous.rules
Array = np.ndarray

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


def simulate(store: Any, gradient: Callable[[Array, Any], tuple[Array, float]], workers: Sequence[Worker],
             batches: Iterable[Any], seed: int = 0,
             observe: Optional[Callable[[float, Any], None]] = None) -> Trace:  # fmt: skip
    """Train on a virtual clock; returns what happened, step by step.

    The gradients are real; a step takes as long as its worker's distribution says. The outcome is a function of the
    arguments alone. Each worker draws the lengths of its steps from a random stream of its own.

    Args:
        store: what the workers share, of ``gp.asynchronous.create_store``. It is trained.
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
        >>> for mode in ("sync", "async"):
        ...     store = gp.asynchronous.create_store(mode, np.zeros(1), 2, rules.sgd, lr=0.1)
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
    events: list[tuple[float, int, int, float, Any]] = []  # end, tie, worker, start, what it works with
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


class FlatNet:
    """A classifier with one hidden layer of rectified linear units, whose weights are one flat array.

    Example:
        >>> net = FlatNet(num_inputs=4, num_hidden=3, num_classes=2)
        >>> weights = net.initial(seed=0)
        >>> x, y = np.eye(4, dtype="float32"), np.array([0, 1, 0, 1])
        >>> gradient, num_samples = net.gradient(weights, (x, y))
        >>> weights.shape == gradient.shape == (4 * 3 + 3 + 3 * 2 + 2,), num_samples
        (True, 4)
    """

    def __init__(self, num_inputs: int, num_hidden: int, num_classes: int) -> None:
        self.shapes = [(num_inputs, num_hidden), (num_hidden,), (num_hidden, num_classes), (num_classes,)]

    def initial(self, seed: int) -> Array:
        """Random weights to begin with, float32."""
        random = np.random.RandomState(seed)  # NumPy has frozen its stream
        return rules.concatenate(
            [random.randn(*s) * np.sqrt(2 / s[0]) if len(s) > 1 else np.zeros(s) for s in self.shapes]
        )

    def logits(self, weights: Array, x: Array) -> Array:
        """What the net says of inputs (N, num_inputs): (N, num_classes)."""
        return self._forward(weights, x)[1]

    def gradient(self, weights: Array, batch: Any) -> tuple[Array, int]:
        """The gradient of the mean cross entropy over a batch ``(x, y)``, flat, and the number of its samples."""
        x, y = batch
        hidden, logits, w2 = self._forward(weights, x)
        wrong = np.exp(logits - logits.max(axis=1, keepdims=True))
        wrong /= wrong.sum(axis=1, keepdims=True)
        wrong[np.arange(len(y)), y] -= 1
        wrong /= len(y)
        below = (wrong @ w2.T) * (hidden > 0)
        parts = [x.T @ below, below.sum(axis=0), hidden.T @ wrong, wrong.sum(axis=0)]
        return np.concatenate([part.ravel() for part in parts]), len(y)

    def accuracy(self, weights: Array, x: Array, y: Array) -> float:
        """The share of inputs for which the largest logit is that of the label."""
        return float((self.logits(weights, x).argmax(axis=1) == y).mean())

    def _forward(self, weights: Array, x: Array) -> tuple[Array, Array, Array]:
        w1, b1, w2, b2 = rules.cut(weights, self.shapes)
        hidden = np.maximum(x @ w1 + b1, 0)
        return hidden, hidden @ w2 + b2, w2
