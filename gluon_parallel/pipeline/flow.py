"""The flow of one step's micro-batches through the stages of one replica."""

from __future__ import annotations

import hashlib

from .. import sample_loss
from ..compat import mx
from .orders import BACKWARD, FORWARD, ORDERS, Task
from .stage import as_tuple, mismatch

_FROM_THE_STAGE_BEFORE = (mx.base.MXNetError, TypeError, AssertionError, ValueError)


class Flow:
    """The micro-batches of one replica in one step.

    Args:
        stages: list of :class:`.Stage`.
        micro_batches: list of (inputs on the first device, labels on the last).
        sizes: how many samples each has.
        loss: a function of the last stage's outputs and the labels.
        reduction: see :class:`gluon_parallel.DataParallel`.
        scale: what the gradients are multiplied by.

    Attributes:
        losses, weights: of each micro-batch whose forward pass has been launched.
    """

    def __init__(self, stages, micro_batches, sizes, loss, reduction, scale):
        self._stages, self._sizes = stages, sizes
        self._loss, self._reduction, self._scale = loss, reduction, scale
        self._labels = [labels for _, labels in micro_batches]
        self._inputs = {(0, number): inputs for number, (inputs, _) in enumerate(micro_batches)}
        self._heads: dict = {}  # (stage, micro-batch) -> gradients of the outputs
        self.losses: list = []
        self.weights: list = []
        self._recomputed: set = set()
        self._seed = None

    def recompute(self, order, seed):
        """Keep only the inputs of the stages, and compute activations again where the backward pass comes later.

        Args:
            order: of the passes, a word of :data:`.ORDERS`.
            seed: from which the random numbers follow; None if the stages draw none.
        """
        self._seed = seed
        for stage in range(len(self._stages)):
            tasks = ORDERS[order](stage, len(self._stages), len(self._sizes))
            for task, following in zip(tasks, tasks[1:]):
                if task.kind == FORWARD and following != Task(stage, BACKWARD, task.micro_batch):
                    self._recomputed.add(task)

    def launch(self, task):
        """Launch one pass."""
        (self._forward if task.kind == FORWARD else self._backward)(task.stage, task.micro_batch)

    def _forward(self, stage, number):
        is_last = stage + 1 == len(self._stages)
        keep = Task(stage, FORWARD, number) not in self._recomputed
        outputs, sent = self._stages[stage].forward(
            number, self._inputs.pop((stage, number)), self._function(stage, number), keep, self._seed_of(number)
        )
        if not is_last:
            self._inputs[stage + 1, number] = sent
            return
        [loss] = outputs
        weight = sample_loss.weight_of(loss, self._sizes[number], self._reduction)
        self._heads[stage, number] = (sample_loss.head(loss, weight * self._scale),)
        self.losses.append(loss.detach())
        self.weights.append(weight)

    def _backward(self, stage, number):
        sent = self._stages[stage].backward(
            number, self._heads.pop((stage, number)), self._function(stage, number), self._seed_of(number)
        )
        if stage:
            self._heads[stage - 1, number] = sent

    def _function(self, stage, number):
        """What the stage does with a micro-batch: returns a tuple of arrays, of the last stage the loss."""
        block = self._stages[stage].block
        before = self._stages[stage - 1].block if stage else None

        def call(*inputs):
            try:
                return as_tuple(block(*inputs))
            except _FROM_THE_STAGE_BEFORE as error:
                if before is None:
                    raise
                raise mismatch(error, stage, block, inputs, before) from error

        def call_with_loss(*inputs):
            loss = self._loss(*call(*inputs), *self._labels[number])
            sample_loss.weight_of(loss, self._sizes[number], self._reduction)  # refuses what is no loss
            return (loss,)

        return call_with_loss if stage + 1 == len(self._stages) else call

    def _seed_of(self, number):
        if self._seed is None:
            return None
        return int.from_bytes(hashlib.sha256(f"{self._seed}/{number}".encode()).digest()[:4], "little") & 0x7FFFFFFF
