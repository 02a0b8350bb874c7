"""Small net in NumPy whose weights are one flat array, for studies with the simulator."""

from typing import Any

import numpy as np

from .rules import Array, concatenate, cut


class FlatNet:
    """A classifier with one hidden layer of rectified linear units.

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
        return concatenate([random.randn(*s) * np.sqrt(2 / s[0]) if len(s) > 1 else np.zeros(s) for s in self.shapes])

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
        w1, b1, w2, b2 = cut(weights, self.shapes)
        hidden = np.maximum(x @ w1 + b1, 0)
        return hidden, hidden @ w2 + b2, w2
