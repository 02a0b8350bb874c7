"""A loss over the whole batch, which looks at all its samples: on one device of each process, of what all have."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from ..errors import BatchMismatch
from ..gather import flat, gather_processes, join_devices, refuse_without_rows, with_others
from ..kvstore.contract import is_distributed
from ..kvstore.process_rows import RowsOfAll, rows_over
from ..loss_checks import check_loss
from ..mxnet.arrays import has_graph, is_fresh
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import Nested, as_current, as_legacy, set_zero
from ..mxnet.device_threads.thread import State, apply_on, call_from, joint_pass
from ..mxnet.trainers import LOSS_SCALER, store_of
from ..nn.blocks import blocks_of
from ..reduce.reducer import reducer_of
from ..sample_loss import head_of, mean_of, weight_of
from ..split import map_arrays
from . import checks
from .label_checks import label_check_of

nd = mx.nd
_NORMS = mx.gluon.nn.BatchNorm, mx.gluon.contrib.nn.SyncBatchNorm


def check_options(loss: Any, loss_over: object, accumulate: int) -> None:
    """Refuse another `loss_over` than "shard" and "batch", and what a loss over the batch cannot be trained with."""
    if loss_over not in ("shard", "batch"):
        raise ValueError(
            "loss_over: expected 'shard', for a loss of single samples, or 'batch', for one that looks at other "
            f"samples of the batch; got {loss_over!r}"
        )
    if loss_over == "shard":
        return
    if accumulate > 1:
        raise ValueError(
            f"accumulate={accumulate}: the loss is over the whole batch (loss_over='batch'), and the samples of later "
            "batches are not there yet, so its sum over steps is not the loss of one larger batch. Take a larger batch "
            "with accumulate=1, with gp.nn.recompute where memory is short"
        )
    if parts := getattr(loss, "parts", ()):
        raise ValueError(
            f"loss_over='batch': the loss has parts ({', '.join(parts)}), sums and counts of each device's samples. Of "
            "the whole batch, return the value itself, divided as it should be, and leave out `parts`"
        )
    layers = blocks_of(loss) if isinstance(loss, mx.gluon.Block) else ()
    if norms := [layer.name for layer in layers if isinstance(layer, _NORMS)]:
        raise ValueError(
            f"loss_over='batch': {norms[0]} of the loss is a batch norm, which would see the batch on one device, and "
            "move its running statistics there alone; make it a layer of the net, see gp.nn.convert_sync_batchnorm"
        )


class LossOverBatch:
    """One loss of the whole batch of all devices and processes, and the gradient of its samples' sum.

    The forward passes of all devices end with what the net has returned. It is gathered, with the labels, to one device
    of each process, which computes the loss and the gradient of the outputs. With the rows of that gradient that are
    its own each device goes backward. All processes compute the same, so nothing of the gradient is exchanged before
    the sum of the parameters' gradients.

    Parameters that the loss uses itself have their whole gradient on each process; only that of the first process that
    has samples counts.

    Args:
        loss: returns the loss function, which is called as ``loss(*outputs, *labels)``.
        reduction: as of :func:`.backward_per_sample`; None also takes a single value, the loss of the batch.
        blocks: the net and the loss.
        trainer: with its store; all processes make it at the same time.
        axis: that counts samples.
    """

    def __init__(
        self, loss: Callable[[], Callable], reduction: str | None, blocks: Any, trainer: mx.gluon.Trainer, axis: int
    ) -> None:
        self._reduction, self._label_check = reduction, label_check_of(loss(), axis)
        self._loss, self._blocks, self._trainer, self._axis = loss, blocks, trainer, axis
        store = store_of(trainer)
        self._rows = rows_over(store) if is_distributed(store) else None
        self._nesting: Nested = None  # a shard's outputs and labels, of which the arrays are replaced
        self._has_checked = False
        self._mean: Any = None
        self._kept: list[tuple[Any, Any]] = []  # (gradient of a parameter that the loss uses, what it has added)
        self._thread: threading.Thread | None = None  # of a step without samples
        self._error: BaseException | None = None

    def backward(
        self,
        run: Callable[..., Any],
        shards: Sequence[Nested],
        sizes: Sequence[int],
        devices: Sequence[mx.Context],
        scale: float = 1.0,
    ) -> mx.nd.NDArray:
        """As of :func:`.backward_per_sample`; `run` returns the outputs and labels of a shard, for the loss."""

        def forward(shard: Nested, size: int) -> tuple[mx.nd.NDArray, ...]:
            with mx.autograd.record():
                return self._checked(run(*shard), size)

        with joint_pass():
            rows = apply_on(forward, list(zip(devices, zip(shards, sizes))))
            apply_on(_go_backward, list(zip(devices, zip(rows, self._heads(rows, sizes, scale)))))
        return self._end()

    def _checked(self, returned: tuple[tuple, tuple], size: int) -> tuple[mx.nd.NDArray, ...]:
        """The arrays of a shard's outputs and labels, those of the outputs first."""
        for name, side in zip(("output", "label"), returned):
            refuse_without_rows(side, name, self._axis, size)
        self._nesting = returned
        return tuple(flat(returned))

    def _heads(
        self, rows: Sequence[Sequence[mx.nd.NDArray]], sizes: Sequence[int], scale: float
    ) -> list[tuple[mx.nd.NDArray | None, ...]]:
        """Of each array of a row the gradient of the loss of the whole batch, times `scale`, or None."""
        self._end_thread()
        device = rows[0][0].ctx
        own = call_from(device, self._join, rows)
        everyones = None if self._rows is None else gather_processes(own, sum(sizes), self._rows, self._axis)
        gradients = call_from(device, self._compute, own, everyones, sum(sizes), scale)
        self._take_gradients(is_counted=everyones is None or everyones.is_first)
        heads, begin = [], 0
        for row, size in zip(rows, sizes):
            pairs = zip(row, gradients)
            heads.append(tuple(self._own_rows(gradient, begin, size, array) for array, gradient in pairs))
            begin += size
        if not self._kept and all(head is None for of_device in heads for head in of_device):
            checks.refuse_nothing_to_train(self._blocks)
        return heads

    def _join(self, rows: Sequence[Sequence[mx.nd.NDArray]]) -> Nested:
        """The outputs and labels of this process, on its first device; outside of the graph of the net."""
        nesting, self._nesting = self._nesting, None  # which keeps the graph of the net alive
        with mx.autograd.pause():
            joined = iter(join_devices([[array.detach() for array in row] for row in rows], self._axis))
        return map_arrays(lambda _: next(joined), nesting)

    def _compute(
        self, own: tuple[tuple, tuple], everyones: RowsOfAll | None, num: int, scale: float
    ) -> list[mx.nd.NDArray | None]:
        """Compute the loss, and go backward to the arrays of `own`; returns their gradients, None where it has none."""
        outputs, labels = flat(own[0]), flat(own[1])
        variables = [array if np.dtype(array.dtype).kind == "f" else None for array in outputs]
        for variable in variables:
            if variable is not None:
                variable.attach_grad()
        loss, total = self._loss_of(own, everyones, outputs[0].ctx, num)
        head = head_of(loss.shape, loss.ctx, loss.dtype, self._weight(loss, total) * scale)
        mx.autograd.backward([loss], [head])
        reached = [None if one is None or not is_fresh(one) else as_legacy(one.grad) for one in variables]
        return [*reached, *(None for _ in labels)]

    def _loss_of(
        self, own: tuple[tuple, tuple] | None, everyones: RowsOfAll | None, device: mx.Context, num: int
    ) -> tuple[mx.nd.NDArray, int]:
        """The loss of the whole batch, on `device`, and the number of its samples; keeps its mean."""
        with mx.autograd.record():
            whole: Any = own if everyones is None else with_others(own, everyones, device, self._axis)
            loss = self._call(*whole)
        total = num if everyones is None else everyones.arrays[0].shape[0]
        weight = self._weight(loss, total)
        if not self._has_checked:
            reduction = self._reduction or ("mean" if loss.size == 1 else None)
            has_scale = getattr(self._trainer, LOSS_SCALER, None) is not None
            outputs, labels = map_arrays(lambda array: array.detach(), whole)
            check_loss(self._loss(), outputs, labels, total, reduction, 0, has_scale, self._axis)
            self._has_checked = True
        self._mean = mean_of([loss], [weight], [total])
        return loss, total

    def _call(self, outputs: tuple, labels: tuple) -> Any:
        """What the loss function returns; errors name the shapes of the whole batch."""
        loss = self._loss()
        try:
            if self._label_check is not None and not self._has_checked and len(outputs) == len(labels) == 1:
                self._label_check.look(outputs[0], labels[0], 1, 0, waits=True)
            return loss(*outputs, *labels)
        except (TypeError, mx.base.MXNetError) as error:
            said = [", ".join(str(array.shape) for array in flat(side)) or "none" for side in (outputs, labels)]
            error.args = (f"{error} (the loss was called for the whole batch: outputs {said[0]}; labels {said[1]})",)
            raise

    def _weight(self, loss: mx.nd.NDArray, size: int) -> int:
        """As :func:`.weight_of`; a single value is the loss of the batch, whose gradient is not divided."""
        if not isinstance(loss, nd.NDArray):
            raise BatchMismatch(f"the loss returned a {type(loss).__name__}; expected one NDArray")
        if self._reduction is None and loss.size == 1:
            return size
        if self._reduction is None and (not loss.ndim or loss.shape[0] != size):
            raise BatchMismatch(
                f"the loss has shape {loss.shape} for the {size} samples of the whole batch; expected a single value, "
                "the loss of the batch, or one value per sample (first axis). Of one with several values for a sample, "
                "such as one for each of its two views, return the mean: loss.mean()"
            )
        return weight_of(loss, size, self._reduction)

    def _take_gradients(self, is_counted: bool) -> None:
        """Take what the loss has added to gradients of parameters away, until the net's pass has written its own."""
        reducer = reducer_of(self._trainer)
        self._kept = []
        with mx.autograd.pause():
            for index in reducer.reached():
                for is_written, gradient in zip(reducer.marks[index], reducer.gradients[index]):
                    if is_written:
                        self._kept.append((gradient, gradient.copy() if is_counted else None))
                        set_zero(gradient)

    def _end(self) -> mx.nd.NDArray:
        """After the backward passes: put back what the loss itself has added; returns the mean of the whole batch."""
        with mx.autograd.pause():
            for gradient, of_loss in self._kept:
                if of_loss is not None:
                    mx.nd.sparse.add(as_legacy(gradient), as_legacy(of_loss)).copyto(as_legacy(gradient))
        self._kept = []
        return self._mean

    def _own_rows(self, gradient: Any, begin: int, size: int, array: mx.nd.NDArray) -> Any:
        """The rows of a gradient that are those of the array, where that is, or None."""
        if gradient is None or not has_graph(array):
            return None
        rows = nd.slice_axis(gradient, axis=self._axis, begin=begin, end=begin + size)
        return rows.as_in_context(array.ctx).astype(array.dtype, copy=False)

    def add_nothing(self, device: mx.Context) -> None:
        """Without samples: take part in gathering, from a thread of its own, and compute the loss without its gradient.

        This thread meanwhile follows the layers of the other processes, whose outputs need them.
        """
        self._end_thread()

        def follow() -> None:
            try:
                assert self._rows is not None  # there are other processes
                everyones = gather_processes((), 0, self._rows, self._axis)
                if everyones is None:
                    self._mean = nd.zeros(1, ctx=device)
                else:
                    call_from(device, self._loss_of, None, everyones, device, 0)
            except BaseException as error:  # it is raised where the step waits for this thread
                self._error = error

        self._thread = threading.Thread(target=State().call, args=[follow], name="loss over the batch", daemon=True)
        self._thread.start()

    def mean_without_samples(self, device: mx.Context) -> mx.nd.NDArray:
        """What a step without samples returns, after :meth:`add_nothing`: the mean loss of all processes."""
        error = self._end_thread()
        if error is not None:
            raise error
        return as_current(self._mean)

    def _end_thread(self) -> BaseException | None:
        """Wait for the thread of a step without samples, also of one that has failed; returns what has ended it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()  # it ends: what it gathers has a limit
        error, self._error = self._error, None
        return error


def _go_backward(row: Sequence[mx.nd.NDArray], heads: Sequence[mx.nd.NDArray | None]) -> None:
    """A backward pass from those arrays of a row that have a head gradient, if there are any."""
    pairs = [(array, head) for array, head in zip(row, heads) if head is not None]
    if pairs:
        mx.autograd.backward(*map(list, zip(*pairs)))
