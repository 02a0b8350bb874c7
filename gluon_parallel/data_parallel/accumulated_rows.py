"""Accumulation of row_sparse gradients over steps, for which MXNet's backward pass has no ``grad_req="add"``."""

from __future__ import annotations

from ..allreduce import gradients
from ..compat import mx
from ..compat.array_types import set_zero


class AccumulatedRows:
    """Sums of the row_sparse gradients of the steps that make one update, on each device."""

    def __init__(self, trainer: mx.gluon.Trainer) -> None:
        self._trainer = trainer
        self._sums: dict[int, tuple] = {}  # id of a gradient -> (the gradient, its sum over the steps)

    def add_step(self) -> None:
        """Take the gradients of one more step; they are zero then, for a device that has no samples in the next one."""
        for parameter in gradients.trainable(self._trainer):
            if parameter._grad_stype == "default":
                continue
            for fresh, gradient in zip(gradients.flags(parameter), parameter.list_grad()):
                if fresh:
                    known = self._sums.get(id(gradient))
                    total = gradient.copy() if known is None else mx.nd.sparse.add(known[1], gradient)
                    self._sums[id(gradient)] = gradient, total
                    set_zero(gradient)

    def write(self) -> None:
        """Have the gradients be the sums."""
        for gradient, total in self._sums.values():
            total.copyto(gradient)

    def clear(self) -> None:
        """Forget the sums."""
        self._sums.clear()
