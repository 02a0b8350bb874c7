"""Gradient of a loss over the samples of several shards, whose values are per sample, a mean or a sum."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from .errors import BatchMismatch
from .mxnet.compat import mx
from .mxnet.compat.array_types import BFLOAT16, Nested, as_current, as_legacy
from .mxnet.device_threads.thread import apply_on
from .native import function

nd = mx.nd
_begin_pass, _end_pass = function("gp_begin_pass", 0, keeps_lock=True), function("gp_end_pass", 0, keeps_lock=True)


class LossPerSample:
    """One value per sample, or one per shard, their mean or sum; the gradient is that of the samples' sum.

    Args:
        reduction: ``"mean"`` or ``"sum"`` if the loss returns a single value per shard; None for one value per sample
            (first axis; further axes are summed).

    Raises:
        ValueError: there is no such reduction.
    """

    is_divided = False  # the sum of all gradients is to be divided by the number of samples
    needs_all = False  # the heads of a backward pass follow from the forward passes of all shards
    parts: dict[str, mx.nd.NDArray] = {}

    def __init__(self, reduction: str | None = None) -> None:
        if reduction not in (None, "mean", "sum"):
            raise ValueError(
                "reduction: expected 'mean' or 'sum' for a loss that returns a single value per device, or None for "
                f"one value per sample; got {reduction!r}"
            )
        self._reduction = reduction

    def backward(
        self,
        run: Callable[..., Any],
        shards: Sequence[Nested],
        sizes: Sequence[int],
        devices: Sequence[mx.Context],
        scale: float = 1.0,
    ) -> mx.nd.NDArray:
        """Run the forward and backward passes of all shards; those of one shard after the other's, unless `needs_all`.

        Args:
            run: a function of a shard's arguments, nested in a tuple, that returns its loss.
            shards: one per device, see :func:`parallel_apply`.
            sizes: how many samples each has.
            devices: the device of each.
            scale: what the gradients, and they alone, are multiplied by.

        Returns:
            The mean loss over all samples, of shape (1,), on the first shard's device; not waited for.

        Raises:
            BatchMismatch: the loss has another form.
        """

        def forward(shard: Nested, size: int) -> tuple[mx.nd.NDArray, ...]:
            with mx.autograd.record():
                return self.checked(run(*shard), size)

        def both(shard: Nested, size: int) -> tuple[mx.nd.NDArray, ...]:
            row = forward(shard, size)
            _go_backward(row, self.heads([row], [size], scale)[0])
            return row

        _begin_pass()  # of all devices
        try:
            rows = apply_on(forward if self.needs_all else both, list(zip(devices, zip(shards, sizes))))
            if self.needs_all:
                apply_on(_go_backward, list(zip(devices, zip(rows, self.heads(rows, sizes, scale)))))
        finally:
            _end_pass()
        return self.mean(rows, sizes)

    def checked(self, loss: Any, size: int) -> tuple[mx.nd.NDArray, ...]:
        """What the loss function returned for `size` samples, as a tuple of arrays; refuses another form."""
        self._weight(loss, size)
        return (loss,)

    def heads(
        self, rows: Sequence[Sequence[mx.nd.NDArray]], sizes: Sequence[int], scale: float
    ) -> Sequence[tuple[mx.nd.NDArray | None, ...]]:
        """The head gradients for the first arrays of each row, which :meth:`checked` has returned, times `scale`.

        None for an array from which no gradient follows.
        """
        weights = [self._weight(loss, size) * scale for (loss,), size in zip(rows, sizes)]
        return [(_constant(weight, loss.shape, loss.ctx, loss.dtype),) for (loss,), weight in zip(rows, weights)]

    def mean(self, rows: Sequence[Sequence[mx.nd.NDArray]], sizes: Sequence[int]) -> mx.nd.NDArray:
        """What :meth:`backward` returns."""
        losses = [loss for (loss,) in rows]
        return _mean(losses, [self._weight(loss, size) for loss, size in zip(losses, sizes)], sizes)

    def add_nothing(self, device: mx.Context) -> None:
        """Take part, without samples, in the sums over all processes; there are none."""

    def mean_without_samples(self, device: mx.Context) -> mx.nd.NDArray:
        """What a step without samples returns, (1,) on `device`, after :meth:`add_nothing`."""
        return as_current(sum(self.parts.values(), nd.zeros(1, ctx=device)))

    def _weight(self, loss: mx.nd.NDArray, size: int) -> int:
        """What one element of a shard's loss counts: 1 in a sum over the samples, all samples if it is their mean."""
        if not isinstance(loss, nd.NDArray):
            raise BatchMismatch(f"the loss returned a {type(loss).__name__}; expected one NDArray")
        where = f"the loss has shape {loss.shape} for {size} samples on {loss.ctx}"
        if self._reduction is not None:
            if loss.size != 1:
                raise BatchMismatch(
                    f"{where}; expected a single value, because reduction={self._reduction!r}. For one value per "
                    "sample (first axis), as of Gluon's losses, leave it out"
                )
            return size if self._reduction == "mean" else 1
        if loss.ndim and loss.shape[0] == size:
            return 1
        raise BatchMismatch(
            f"{where}; expected one value per sample (first axis), or a single value, their mean or sum: pass "
            'reduction="mean" or reduction="sum" beside the loss. One that divides by a number of its own, such as '
            "positives, is neither: return pairs (sum, count), see `parts` of gp.DataParallel"
        )


@functools.lru_cache(maxsize=64)
def _constant(value: float, shape: tuple[int, ...], device: mx.Context, dtype: Any) -> mx.nd.NDArray:
    """An array of one value, which is only read; the steps of a training need few."""
    return nd.full(shape, value, device, dtype)


def _go_backward(row: Sequence[mx.nd.NDArray], heads: Sequence[mx.nd.NDArray | None]) -> None:
    pairs = [(array, head) for array, head in zip(row, heads) if head is not None]
    if pairs:
        mx.autograd.backward(*map(list, zip(*pairs)))


def _mean(losses: Sequence[mx.nd.NDArray], weights: Sequence[int], sizes: Sequence[int]) -> mx.nd.NDArray:
    """The mean over all samples, (1,), on the first device; an element of a loss counts for `weights` of them."""
    # As mx.nd arrays, in float32 where half precision could not hold the sum of a batch.
    wide = [one.astype("float32") if one.dtype in (np.float16, BFLOAT16) else one for one in map(as_legacy, losses)]
    if len(losses) == 1 and weights[0] == 1 and losses[0].shape == (sizes[0],):
        return as_current(wide[0].mean())
    sums = [loss.sum().as_in_context(losses[0].ctx) for loss in wide]
    sums = [one if weight == weights[0] else one * (weight / weights[0]) for one, weight in zip(sums, weights)]
    return as_current(nd.add_n(*sums) * (weights[0] / sum(sizes)))
