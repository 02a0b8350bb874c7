"""The flow of one step's micro-batches through the stages of one replica."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Callable

from ..errors import BatchMismatch, GluonParallelError
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import Nested
from ..mxnet.device_threads import call_from
from ..mxnet.device_threads.seeds import derive_seed
from ..sample_loss import head_of, mean_of, weight_of
from ..split import shard
from ..step.losses import SumsOfParts
from .checks import check_samples
from .orders import BACKWARD, FORWARD, Task, tasks_of
from .stage import INPUT_ERRORS, Arrays, Stage, concatenate, cut, described, reason_of

MicroBatch = tuple[int, int]  # the id of its `Flow`, and its number there


class StepLoss:
    """The loss of one step over the micro-batches of all replicas; its gradients are multiplied by `scale`.

    It is one of `parts`, or, where there are none, one per sample, whose `reduction` is that of
    :func:`.backward_per_sample`. It calls ``look(outputs, labels, begin)``, if given, for the samples of the batch from
    `begin` on.
    """

    def __init__(
        self,
        function: Callable[..., Nested],
        reduction: str | None,
        parts: SumsOfParts | None,
        scale: float,
        look: Callable[[Arrays, tuple, int], None] | None = None,
    ) -> None:
        self._function, self._reduction, self._parts, self._scale = function, reduction, parts, scale
        self._look = look
        self._rows: dict[MicroBatch, tuple[Arrays, int]] = {}  # micro-batch -> (arrays, number of samples)
        self._heads: dict[MicroBatch, Arrays] = {}  # of all micro-batches, where they follow from all of them
        self.first: tuple[Arrays, tuple, int] | None = None  # the arguments of the first call

    def __call__(self, outputs: Arrays, labels: tuple, begin: int, size: int) -> Arrays:
        """The loss of the `size` samples of the batch from `begin` on, a tuple of arrays."""
        if self.first is None:
            self.first = outputs, labels, size
        if self._look is not None:
            self._look(outputs, labels, begin)
        try:
            loss = self._function(*outputs, *labels)
        except GluonParallelError:
            raise
        except INPUT_ERRORS as error:
            hint = "" if labels else ". Pass labels after x: step(loss, trainer, x, y)"
            raise BatchMismatch(
                f"the loss cannot take, for {size} samples, {described(outputs)} from the last stage and, as labels, "
                f"{described(labels)}: {reason_of(error)}{hint}"
            ) from error
        if self._parts is not None:
            return self._parts.checked(loss)
        weight_of(loss, size, self._reduction)  # refuses another form
        return (loss,)

    def note(self, key: MicroBatch, arrays: Arrays, size: int) -> None:
        """Note what the call for a micro-batch has returned."""
        self._rows[key] = tuple(array.detach() for array in arrays), size

    def heads(self, key: MicroBatch) -> Arrays:
        """The head gradients of a micro-batch's backward pass; None for an array that has none."""
        row, size = self._rows[key]
        if self._parts is None:
            [loss] = row
            return (head_of(loss.shape, loss.ctx, loss.dtype, weight_of(loss, size, self._reduction) * self._scale),)
        if not self._heads:
            rows = [row for row, _ in self._rows.values()]
            self._heads.update(zip(self._rows, self._parts.heads(rows, self._scale)))
        heads = self._heads[key]
        return heads + (None,) * (len(row) - len(heads))

    def mean(self) -> mx.nd.NDArray:
        """The mean loss, of shape (1,), on the first micro-batch's device."""
        if self._parts is not None:
            return self._parts.mean()
        losses, sizes = zip(*((loss, size) for (loss,), size in self._rows.values()))
        weights = [weight_of(loss, size, self._reduction) for loss, size in zip(losses, sizes)]
        return mean_of(losses, weights, sizes)


class Inbox:
    """What one stage receives in one direction: as it came, concatenated, or cut into micro-batches.

    They come in `num_sent` parts and are taken in `num_taken`: all, or 1. `ends` are their last samples, after a 0.
    """

    def __init__(self, stage: int, ends: Sequence[int], num_sent: int, num_taken: int, axis: int) -> None:
        self._stage, self._ends, self._axis = stage, ends, axis
        self._num_sent, self._num_taken, self._left = num_sent, num_taken, num_taken
        self._sent: dict[int, Arrays] = {}

    def put(self, number: int, arrays: Arrays) -> None:
        self._sent[number] = arrays

    def take(self, number: int) -> Arrays:
        """Take out the arrays of a part, in the thread of the stage's device."""
        if self._num_sent == self._num_taken:
            return self._sent.pop(number)
        if self._num_taken == 1:
            parts = [self._sent.pop(one) for one in range(self._num_sent)]
            for part, begin, end in zip(parts, self._ends, self._ends[1:]):
                self._check(part, end - begin)
            return concatenate(parts, self._axis)
        self._left -= 1
        whole = self._sent[0] if self._left else self._sent.pop(0)
        self._check(whole, self._ends[-1])
        return cut(whole, self._ends[number], self._ends[number + 1], self._axis)

    def _check(self, arrays: Arrays, num: int) -> None:
        check_samples(self._stage - 1, [array for array in arrays if array is not None], num, self._axis)


class Flow:
    """The micro-batches of one replica in one step.

    Args:
        inputs, labels: its shard of the batch, on the first and on the last device.
        begin: the index in the batch of its first sample.
        sizes: how many samples each micro-batch has.
        counts, order: as of :func:`.tasks_of`.
    """

    def __init__(
        self,
        stages: list[Stage],
        inputs: Arrays,
        labels: tuple,
        begin: int,
        sizes: Sequence[int],
        counts: Sequence[int],
        order: str,
        loss: StepLoss,
        axis: int,
    ) -> None:
        self._stages, self._counts, self._order = stages, counts, order
        self._loss, self._labels, self._begin, self._axis = loss, labels, begin, axis
        self._ends = ends = [0, *itertools.accumulate(sizes)]
        self._inputs, self._heads = (
            [Inbox(stage, ends, sent, own, axis) for stage, (sent, own) in enumerate(zip(others, counts))]
            for others in ([1, *counts], [*counts[1:], 1])
        )
        self._inputs[0].put(0, inputs if counts[0] > 1 else tuple(array.copy() for array in inputs))
        self._recomputed: set[Task] = set()
        self._seed: int | None = None

    def recompute(self, seed: int | None) -> None:
        """Keep only inputs, and compute activations again where the backward pass comes later.

        The random numbers follow from `seed`; None if the stages draw none.
        """
        self._seed = seed
        for stage in range(len(self._stages)):
            tasks = tasks_of(self._order, stage, self._counts)
            for task, following in zip(tasks, tasks[1:]):
                if task.kind == FORWARD and following != Task(stage, BACKWARD, task.micro_batch):
                    self._recomputed.add(task)

    def launch(self, task: Task) -> None:
        """Launch one pass, from the thread of its device."""
        stage, number = self._stages[task.stage], task.micro_batch
        if task.kind == FORWARD:
            call_from(stage.device, self._forward, stage, task)
            return
        # Not in that thread: they may depend on the losses of replicas on other devices.
        heads = self._loss.heads((id(self), number)) if stage is self._stages[-1] else None
        call_from(stage.device, self._backward, stage, number, heads)

    def _forward(self, stage: Stage, task: Task) -> None:
        number, inputs = task.micro_batch, self._inputs[task.stage].take(task.micro_batch)
        function, seed = self._function(stage, number), self._seed_of(number)
        outputs, sent = stage.forward(number, inputs, function, task not in self._recomputed, seed)
        if sent is not None:
            self._inputs[task.stage + 1].put(number, sent)
        else:
            begin, end = self._span(number)
            self._loss.note((id(self), number), outputs, end - begin)

    def _backward(self, stage: Stage, number: int, heads: Arrays | None) -> None:
        heads = self._heads[stage.number].take(number) if heads is None else heads
        sent = stage.backward(number, heads, self._function(stage, number), self._seed_of(number))
        if sent is not None:
            self._heads[stage.number - 1].put(number, sent)

    def _span(self, number: int) -> tuple[int, int]:
        """From which sample to which one a pass of the last stage goes."""
        return (self._ends[number], self._ends[number + 1]) if self._counts[-1] > 1 else (0, self._ends[-1])

    def _function(self, stage: Stage, number: int) -> Callable[..., Arrays]:
        """What the stage does with a micro-batch: returns a tuple of arrays, of the last stage the loss."""

        def call_with_loss(*inputs: mx.nd.NDArray) -> Arrays:
            begin, end = self._span(number)
            labels = shard(self._labels, begin, end, self._axis, stage.device) if self._labels else ()
            return self._loss(stage.call(*inputs), labels, self._begin + begin, end - begin)

        return call_with_loss if stage is self._stages[-1] else stage.call

    def _seed_of(self, number: int) -> int | None:
        return None if self._seed is None else derive_seed(self._seed, number)
