"""Modes, from ``sync`` (workers wait at every step) to ``async`` (never), and each one's parameter server."""

import difflib
import math
from collections import Counter
from typing import NamedTuple, Optional, Union

from .. import bounds
from ..errors import ConfigError
from . import rules
from .parameter_server import ParameterServer
from .rules import Array, Update


class Mode(NamedTuple):
    """A mode and its number."""

    name: str  # one of MODES
    value: float  # what it means depends on the name; 0 where it means nothing

    def __str__(self) -> str:
        return self.name if _KINDS[self.name].option is None else f"{self.name}:{self.value:g}"


def parse_mode(text: str) -> Mode:
    """Read a setting such as ``"ssp:2"``.

    Args:
        text: a name, and after a colon its number if it has one:
            ``sync`` (every step waits for all workers), ``backup:b`` (... for all but the slowest b), ``ssp:s`` (a
            worker may be s steps ahead of the slowest), ``local:H`` (weights are averaged after every H steps),
            ``elastic:beta`` (workers and centre pull each other: EASGD), ``async`` (nobody waits), ``dc:lambda``
            (nobody waits, and gradients are compensated for their delay: DC-ASGD).

    Raises:
        ConfigError: there is no such mode, or its number makes no sense.

    Example:
        >>> parse_mode("ssp:3"), str(parse_mode("local"))
        (Mode(name='ssp', value=3), 'local:8')
    """
    name, colon, number = str(text).strip().lower().partition(":")
    if name not in _KINDS:
        close = difflib.get_close_matches(name, MODES, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise ConfigError(f"mode: {text!r} is none of the modes. {hint}The right ones are {', '.join(MODES)}")
    kind = _KINDS[name]
    if not colon:
        return Mode(name, kind.default)
    if kind.option is None:
        raise ConfigError(f"mode: {text!r}: {name} has no number; write {name}")
    try:
        value = bounds.whole("mode", number, 0) if kind.whole else float(number)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= kind.least) or (name == "elastic" and value > 1):
        wanted = f"{'a whole number' if kind.whole else 'a number'}, {kind.least:g} or more"
        raise ConfigError(f"mode: {bounds.shown(text)}: {bounds.shown(number)} is not {wanted}; it says {kind.meaning}")
    return Mode(name, value)


class Rounds(ParameterServer):
    """``sync`` and ``backup``: one update per round, with the mean of the gradients of all but the slowest `drop`.

    A gradient that comes after its round was closed is not applied. Gradients are added in the order of the workers'
    numbers, not of their arrival, so the same batches give the same bits.
    """

    drop = 0

    def _begun(self):
        self._gathered: dict[int, tuple[Array, float]] = {}

    def _may_start(self, worker):
        return worker not in self._gathered

    def _received(self, worker, grant, gradient, num_samples):
        if grant.version != self.version:
            return False  # its round is over
        self._gathered[worker] = (gradient, num_samples)
        self._close()
        return True

    def _close(self):
        wanted = max(1, len(self._active) - self.drop)
        present = [worker for worker in self._active if worker in self._gathered]
        if self._gathered and (len(present) >= wanted or not self._active):
            gathered = [self._gathered[worker] for worker in sorted(self._gathered)]
            self._gathered = {}
            gradients, counts = zip(*gathered)
            self._apply(rules.average(gradients, counts))


class Immediate(ParameterServer):
    """``ssp``, ``async`` and ``dc``: every push is an update.

    With a `bound` of 0 all start each step together, from the same weights, and their updates add up to that of
    ``sync``. The backup of the delay compensation is the version that this worker pulled.
    """

    bound: Optional[int] = None  # how many steps a worker may be ahead of the slowest one; None: as many as it can
    strength = 0.0  # lambda of the compensation

    def _may_start(self, worker):
        slowest = min(self._num_pushes[other] for other in self._active)
        return self.bound is None or self._num_pushes[worker] - slowest <= self.bound

    def _received(self, worker, grant, gradient, num_samples):
        if self.strength:
            gradient = rules.compensate(gradient, self.weights, grant.weights, self.strength)
        self._apply(gradient, share=1 / self.num_workers)
        return True


class Apart(ParameterServer):
    """Base of modes in which every worker steps by itself, from weights and with an optimizer state of its own."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._weights_of: dict[int, Array] = {}  # weights of workers that have stepped since they had the common ones
        self._states: dict[int, tuple] = {}

    def _weights_for(self, worker):
        return self._weights_of.get(worker, self.weights)

    def _received(self, worker, grant, gradient, num_samples):
        state = self._states.get(worker, ())
        self._weights_of[worker], self._states[worker] = self._update(grant.weights, gradient, state, self.lr)
        return True


class Local(Apart):
    """``local``: every worker steps by itself; after `every` steps all wait and take the mean of their weights."""

    every = 1

    def _begun(self):
        self._weights_of = {}
        self._steps: Counter[int] = Counter()
        self._samples: Counter[int] = Counter()

    def _pulled(self, worker, grant):
        return self.version  # the common weights do not change while a worker steps

    def _may_start(self, worker):
        return self._steps[worker] < self.every

    def _received(self, worker, grant, gradient, num_samples):
        super()._received(worker, grant, gradient, num_samples)
        self._steps[worker] += 1
        self._samples[worker] += num_samples
        self._close()
        return True

    def _close(self):
        if self._weights_of and all(self._steps[worker] >= self.every for worker in self._active):
            workers = sorted(self._weights_of)
            mean = rules.average([self._weights_of[worker] for worker in workers], [self._samples[w] for w in workers])
            self._begun()
            self._publish(mean)


class Elastic(Apart):
    """``elastic``: every worker steps by itself, and after every step it and the centre move towards each other.

    `attraction` is ``beta`` of EASGD: how far the centre would move if all workers stood at one place.
    """

    attraction = 0.9

    def _received(self, worker, grant, gradient, num_samples):
        super()._received(worker, grant, gradient, num_samples)
        alpha = self.attraction / self.num_workers
        self._weights_of[worker], centre = rules.attract(self._weights_of[worker], self.weights, alpha)
        self._publish(centre)
        return True


class _Kind(NamedTuple):
    server: type[ParameterServer]
    option: Optional[str]  # of the server: the number after the colon; None: there is none
    meaning: str  # of that number
    default: float
    whole: bool
    least: float


_KINDS = {
    "sync": _Kind(Rounds, None, "", 0, True, 0),
    "backup": _Kind(Rounds, "drop", "how many of the slowest gradients each step does without", 1, True, 0),
    "ssp": _Kind(Immediate, "bound", "how many steps a worker may be ahead of the slowest", 2, True, 0),
    "local": _Kind(Local, "every", "steps between two averages of the weights", 8, True, 1),
    "elastic": _Kind(
        Elastic, "attraction", "how strongly workers and centre attract each other, 0 to 1", 0.9, False, 0
    ),
    "async": _Kind(Immediate, None, "", 0, True, 0),
    "dc": _Kind(Immediate, "strength", "lambda, the strength of the compensation", 0.04, False, 0),
}
MODES = tuple(_KINDS)


def create_store(mode: Union[str, Mode], weights: Array, num_workers: int, update: Update, lr: float,
                 reject_above: Optional[int] = None) -> ParameterServer:  # fmt: skip
    """The parameter server of a mode, see :func:`parse_mode`; other arguments as of :class:`ParameterServer`.

    ConfigError: the mode is none, or makes no sense with so many workers, or rejects what is never stale.

    Example:
        >>> import numpy as np
        >>> server = create_store("async", np.zeros(1), num_workers=2, update=rules.sgd, lr=1.0)
        >>> server.begin(range(9))
        >>> grant = server.take(0), server.take(1)
        >>> server.push(0, np.array([1.0])), server.push(1, np.array([1.0]))
        (Pushed(staleness=0, applied=True), Pushed(staleness=1, applied=True))
        >>> server.weights.tolist()
        [-1.0]
    """
    name, value = parse_mode(mode) if isinstance(mode, str) else mode
    if reject_above is not None and name not in ("ssp", "async", "dc"):
        raise ConfigError(f"reject_above={reject_above}: in mode {name} no gradient is applied late; leave it out")
    kind = _KINDS[name]
    if name == "backup" and value >= num_workers:
        raise ConfigError(f"backup:{value:g} with {num_workers} workers leaves no gradient to update with")
    server = kind.server(weights, num_workers, update, lr, reject_above)
    if kind.option is not None:
        setattr(server, kind.option, int(value) if kind.whole else value)
    return server
