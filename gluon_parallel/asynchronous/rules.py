"""Update rules as pure functions on flat arrays, for threads and processes.

Nothing is changed in place: an array of weights, once made, is a version, which every worker may keep. So a pull is no
copy, and the backup of each worker that delay compensation needs is the version that this worker pulled.
"""

import inspect
import math
from collections.abc import Sequence
from functools import partial
from typing import Callable, Optional

import numpy as np

from ..errors import ConfigError

Array = np.ndarray
# (weights, gradient, state, lr) -> (weights, state); the state is a tuple of arrays and numbers
Update = Callable[[Array, Array, tuple, float], "tuple[Array, tuple]"]


def sgd(weights, gradient, state, lr, momentum=0.0, wd=0.0):
    """A step of stochastic gradient descent, as ``mx.optimizer.SGD`` makes it; returns the new weights and state.

    The state is () at first; the velocity in it contains the learning rate.

    Example:
        >>> sgd(np.array([1.0]), np.array([2.0]), (), lr=0.5)
        (array([0.]), ())
    """
    if wd:
        gradient = gradient + wd * weights
    if not momentum:
        return weights - lr * gradient, ()
    velocity = -lr * gradient
    if state:
        velocity += momentum * state[0]
    return weights + velocity, (velocity,)


def adam(weights, gradient, state, lr, beta1=0.9, beta2=0.999, epsilon=1e-8, wd=0.0):
    """A step of Adam, as ``mx.optimizer.Adam`` makes it; arguments and returns as for :func:`sgd`."""
    mean, square, steps = state or (np.zeros_like(weights), np.zeros_like(weights), 0)
    if wd:
        gradient = gradient + wd * weights
    steps += 1
    mean = beta1 * mean + (1 - beta1) * gradient
    square = beta2 * square + (1 - beta2) * gradient * gradient
    rate = lr * float(np.sqrt(1 - beta2**steps) / (1 - beta1**steps))
    return weights - rate * mean / (np.sqrt(square) + epsilon), (mean, square, steps)


OPTIMIZERS: dict[str, Callable] = {"sgd": sgd, "adam": adam}


def optimizer(name: str, params: Optional[dict] = None) -> Update:
    """The update rule of a name, with its parameters in ``gluon.Trainer``'s words.

    Raises:
        ConfigError: there is no such rule or parameter here.

    Example:
        >>> update = optimizer("sgd", {"momentum": 0.9})
        >>> update(np.array([1.0]), np.array([1.0]), (), 0.5)[0]
        array([0.5])
    """
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer: {name!r} is not among {', '.join(OPTIMIZERS)}, which work on shared weights")
    known = list(inspect.signature(OPTIMIZERS[name]).parameters)[4:]
    unknown = sorted(set(params or {}) - set(known))
    if unknown:
        raise ConfigError(f"optimizer: {name} has no {unknown[0]!r}; it has learning_rate, {', '.join(known)}")
    return partial(OPTIMIZERS[name], **(params or {}))


def average(arrays: Sequence[Array], counts: Sequence[float]) -> Array:
    """The mean of what workers found, each weighted by its number of samples; added in the order given.

    Example:
        >>> average([np.array([1.0]), np.array([4.0])], [2, 1])
        array([2.])
    """
    if len(arrays) == 1:
        return arrays[0]
    total = sum(counts)
    result = arrays[0] * float(counts[0] / total)
    for array, count in zip(arrays[1:], counts[1:]):
        result += array * float(count / total)
    return result


def concatenate(arrays: Sequence[Array]) -> Array:
    """The arrays one after another in a flat one of float32."""
    return np.concatenate([array.ravel() for array in arrays]).astype(np.float32, copy=False)


def cut(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """The arrays of these shapes that a flat one consists of.

    Example:
        >>> [part.tolist() for part in cut(np.arange(6), [(2, 2), (2,)])]
        [[[0, 1], [2, 3]], [4, 5]]
    """
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes)]


def compensate(gradient: Array, weights: Array, backup: Array, strength: float) -> Array:
    """What a gradient taken at `backup` would be at `weights`, about: DC-ASGD's g + lambda g g (w - w_backup).

    g g stands in for the diagonal of the Hessian, which it estimates near a minimum of a cross entropy. `backup` are
    the weights that this worker, not any other, pulled; `weights` are the newest; `strength` is lambda.

    Example:
        >>> compensate(np.array([2.0]), np.array([3.0]), np.array([2.0]), strength=0.5)
        array([4.])
    """
    return gradient + strength * gradient * gradient * (weights - backup)


def attract(local: Array, centre: Array, alpha: float) -> tuple[Array, Array]:
    """EASGD: a worker's weights and the centre's move towards each other by the share `alpha` of their distance.

    Example:
        >>> attract(np.array([1.0]), np.array([0.0]), alpha=0.25)
        (array([0.75]), array([0.25]))
    """
    pull = alpha * (local - centre)
    return local - pull, centre + pull


def clip(gradient: Array, norm: Optional[float]) -> Array:
    """The gradient, scaled down to a Euclidean norm if it is longer; `norm` None leaves it.

    Example:
        >>> clip(np.array([3.0, 4.0]), 1.0)
        array([0.6, 0.8])
    """
    if norm is None:
        return gradient
    length = float(np.sqrt(np.dot(gradient, gradient)))
    return gradient * (norm / length) if length > norm else gradient
